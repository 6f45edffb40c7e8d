"""The services in virtual time: their live machines, over a simulated network and server."""

"""The agent's IO: control stream, queue, gRPC and clock in; the machine's effects carried out. No decisions."""

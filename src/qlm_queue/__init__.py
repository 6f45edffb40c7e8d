"""The global queue and the virtual queues: the port, its Redis implementation and its memory twin."""

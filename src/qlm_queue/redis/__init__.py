"""The queue on Redis or Valkey: the port's operations in, one server-side script (lua/) each, answers as values out."""

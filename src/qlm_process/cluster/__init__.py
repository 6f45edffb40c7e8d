"""A whole cluster observed from outside: state file and public APIs in, plain values out."""

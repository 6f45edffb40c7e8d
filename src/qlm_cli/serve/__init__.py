"""`qlm serve`: a whole cluster in front of OpenAI-compatible servers that run already. Their addresses come in, their models are found, and
an OpenAI API over HTTP and a gRPC gateway come out."""

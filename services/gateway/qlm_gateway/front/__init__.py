"""Clients' protocols: gRPC (`service`) and the OpenAI API (`http/`); protos and JSON stop here."""

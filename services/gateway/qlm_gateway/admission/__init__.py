"""Admission: a client's request and the queue's facts in; a durable entry or a refusal with its reason out."""

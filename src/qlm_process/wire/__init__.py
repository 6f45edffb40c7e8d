"""Values of decisions to protos and back, for every service alike."""

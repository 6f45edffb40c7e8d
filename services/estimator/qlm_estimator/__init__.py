"""The estimator: learns profiles from what happens to requests, publishes them, and answers when a request would be served."""

"""The Responses API, as far as it is a chat completion: text in, text out, nothing kept but the request itself."""

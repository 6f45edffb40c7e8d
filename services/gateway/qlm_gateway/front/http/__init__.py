"""The OpenAI API over HTTP: JSON in and out of the calls of `service.GatewayService`. docs/reference/http.md is its contract."""

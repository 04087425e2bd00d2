"""OpenAI's text API: request schemas, answers, streams."""

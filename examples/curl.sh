#!/usr/bin/env bash
# The endpoints with curl. Start a server with `headrace serve`, then: examples/curl.sh [URL]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
json='Content-Type: application/json'

post() { curl --silent --show-error --fail-with-body "$url$1" -H "$json" -d "$2"; echo; }

echo "# is it ready?"
curl --silent --show-error "$url/health"; echo

echo "# a chat"
post /v1/chat/completions '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 20}'

echo "# score a text: log-probabilities of the prompt"
post /v1/completions '{"prompt": "The sky is blue", "echo": true, "logprobs": 1, "max_tokens": 1}'

echo "# a stream"
post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 8, "stream": true}'

echo "# tokens"
post /tokenize '{"prompt": "Hello, world", "return_token_strs": true}'

echo "# a misspelt field is refused"
curl --silent --show-error "$url/v1/completions" -H "$json" -d '{"prompt": "x", "temprature": 0}'; echo

echo "# metrics"
curl --silent --show-error "$url/metrics" | grep '^headrace:generation_tokens_total'

"""Talk to a running server through the official client: models, a chat, log-probabilities, an error.

Start one with ``headrace serve``, then: python examples/openai_client.py [URL]
"""

import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
print("model:", model)

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers."}],
    temperature=0,
    max_tokens=40,
    logprobs=True,
    top_logprobs=2,
)
print("answer:", answer.choices[0].message.content)
print(
    "first token:", [(top.token, round(top.logprob, 2)) for top in answer.choices[0].logprobs.content[0].top_logprobs]
)
print("usage:", answer.usage.prompt_tokens, "+", answer.usage.completion_tokens, "tokens")

# Fields that OpenAI does not have go through extra_body; a misspelt one is refused, with the nearest known name.
try:
    client.completions.create(model=model, prompt="Once", extra_body={"top_kk": 5})
except openai.BadRequestError as error:
    print("refused:", error.body["message"])

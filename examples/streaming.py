"""Stream a chat, token by token, with the token counts at the end.

Start a server with ``headrace serve``, then: python examples/streaming.py [URL]
"""

import asyncio
import sys

import openai


async def main(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a short story about a mill."}],
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for event in stream:
            # The last event has the usage and no choice.
            for choice in event.choices:
                print(choice.delta.content or "", end="", flush=True)
            if event.usage:
                print(f"\n[{event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens]")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))

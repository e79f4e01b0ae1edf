"""Stream a chat with log-probabilities, under a seed that gives the same text each time.

python examples/server/streaming.py http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", help="address of the server")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
[model] = client.models.list().data
messages = [{"role": "user", "content": "How do I list the files of a folder?"}]
stream = client.chat.completions.create(
    model=model.id, messages=messages, max_tokens=40, seed=7, temperature=0.7, stream=True, logprobs=True
)
for part in stream:
    for choice in part.choices:
        print(choice.delta.content or "", end="", flush=True)
        for entry in choice.logprobs.content if choice.logprobs else ():
            print(f" [{entry.logprob:.2f}]", end="")
print()

"""Ask `redrafter serve` for a text with OpenAI's client (pip install openai), and print tokens per step.

python examples/server/completion.py http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", help="address of the server")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
[model] = client.models.list().data
completion = client.completions.create(model=model.id, prompt="It was a dark night, and", max_tokens=40, seed=1)
speculation = completion.model_extra["metrics"]["speculative_decoding"]
print(completion.choices[0].text)
print(f"{speculation['mean_acceptance_length']:.2f} tokens per step")

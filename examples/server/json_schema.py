"""Ask for an answer that fits a JSON schema, and for one that matches a regular expression.

python examples/server/json_schema.py http://127.0.0.1:8000
"""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", help="address of the server")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
[model] = client.models.list().data
schema = {
    "type": "object",
    "properties": {
        "command": {"enum": ["ls", "find", "grep"]},
        "flags": {"type": "string", "pattern": "^-[a-z]{1,4}$"},
    },
    "required": ["command", "flags"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model.id,
    messages=[{"role": "user", "content": "How do I list the files of a folder?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "call", "schema": schema}},
    max_tokens=100,
    temperature=0,
)
print(json.loads(answer.choices[0].message.content))

date = client.completions.create(
    model=model.id,
    prompt="The letter is dated ",
    max_tokens=20,
    temperature=0,
    extra_body={"structured_outputs": {"regex": r"[1-3]?[0-9] (May|June|July) 18[0-9]{2}"}},
)
print(date.choices[0].text)

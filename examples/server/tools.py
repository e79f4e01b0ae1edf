"""Make the model call a tool, and ask for an answer to the tool's result.

python examples/server/tools.py http://127.0.0.1:8000
"""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", help="address of the server")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
[model] = client.models.list().data
tool = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "The height of the sea, in metres.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Dover", "Brest"]},
                "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            },
            "required": ["place", "hour"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "How high is the sea at Dover at noon?"}]
options = {"model": model.id, "tools": [tool], "max_tokens": 60, "temperature": 0}
reply = client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
for call in reply.tool_calls:
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments})")
    height = 6.1 if arguments["place"] == "Dover" else 7.2
    messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"metres": height})}]
print(client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message.content)

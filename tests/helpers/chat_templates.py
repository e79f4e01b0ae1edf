"""Short chat templates with the behaviours of published families, in which they differ from each other."""

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ '<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_QWEN_RESULT = "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"  # of a tool
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_SPLIT_THOUGHT = (
    "{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}{% set content = m.content %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{% set thought = thought.strip() %}"
)

# Calls are objects, written by `tojson`: JSON text would be quoted again.
QWEN2_5 = (
    _QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    + _QWEN_RESULT
    + "{% elif m.role != 'system' or not loop.first %}"
    + _CHATML
    + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Calls are objects or text, which are spelt differently. Thoughts of earlier turns are dropped; the last turn gets an
# empty one, which the prompt has only with thoughts turned off.
QWEN3 = (
    _QWEN_TOOLS
    + _LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SPLIT_THOUGHT
    + "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% set given = call.function.arguments %}"
    "{{ (given if given is string else given | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    + _QWEN_RESULT
    + "{% elif m.role != 'system' or not loop.first %}"
    + _CHATML
    + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The prompt opens a thought. Calls are XML of the items of an object.
QWEN3_5 = (
    _QWEN_TOOLS
    + _LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SPLIT_THOUGHT
    + "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' + (value | string) + '\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}" + _QWEN_RESULT + "{% elif m.role != 'system' %}" + _CHATML + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# A turn ends with the next one's mark. Turning thoughts off changes the user's turn too.
GLM4_5 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{% endif %}"
    + _LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif %}"
    "{% elif m.role == 'assistant' %}" + _SPLIT_THOUGHT + "{{ '<|assistant|>\n<think>' }}"
    "{{ (thought if loop.index0 > ns.last else '') + '</think>' }}{% if content %}{{ '\n' + content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{ (value if value is string else value | tojson) + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}"
    "{% endfor %}{% elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}"
    "{% else %}{{ '<|system|>\n' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)
_DEEPSEEK_CALL = (
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{ call.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% elif m.role == 'assistant' %}IF_CALLS"
    "{{ '<｜Assistant｜>' }}{% for call in m.tool_calls %}" + _DEEPSEEK_CALL + "{% endfor %}{{ eos_token }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# The prompt opens a thought, which no turn has. Calls are JSON text, which is concatenated; tools are ignored.
DEEPSEEK_V3 = _DEEPSEEK.replace("IF_CALLS", "{% if 'tool_calls' in m %}")
# As that, with calls only in a turn whose content is null.
R1_DISTILL = _DEEPSEEK.replace("IF_CALLS", "{% if m.content is none %}")
# One call in a turn, without text; tools are in the first question.
LLAMA3_1 = (
    "{{ bos_token }}{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + messages[0].content | trim + '<|eot_id|>' }}{% endif %}"
    "{% for m in rest %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{ m.content | tojson + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if tools and loop.first %}"
    "{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}{% endif %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Neither tools nor calls; a system prompt of its own.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    + _CHATML
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same, content may be parts, the system's text is in the first question, and roles alternate.
GEMMA3 = (
    "{{ bos_token }}{% set first, rest = '', messages %}{% if messages[0].role == 'system' %}"
    "{% set first, rest = messages[0].content + '\n\n', messages[1:] %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text | trim }}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "qwen3.5": QWEN3_5,
    "glm4.5": GLM4_5,
    "deepseek-v3": DEEPSEEK_V3,
    "r1-distill": R1_DISTILL,
    "llama3.1": LLAMA3_1,
    "smollm2": SMOLLM2,
    "gemma3": GEMMA3,
}

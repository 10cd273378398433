"""Ten templates, with the structures of those that are published, and conversations for them."""

# ruff: noqa: E501

TEMPLATES = {
    "chatml with a default system": """
{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "headers": """
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|header|>' + message['role'] + '<|end_header|>\\n\\n'+ message['content'] | trim + '<|eot|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
{{ content }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|header|>assistant<|end_header|>\\n\\n' }}
{% endif %}
""",
    "instructions that alternate": """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "roles of other names": """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}\
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}
{%- for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}
{%- endif %}
{{- '<end>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
""",
    "reasoning of earlier turns is dropped": """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
""",
    "signs of other alphabets": """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<｜Assistant｜>' + message['content'] + '<｜end｜>' }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
""",
    "tools": """
{%- if tools %}
{{- '<|system|>\\nTools:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
{%- endfor %}
{%- else %}
{{- '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
""",
    "macros and breaks": """
{%- macro head(role, last=false) -%}<<{{ role | upper }}{{ '!' if last }}>>{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if loop.index > 8 %}{% break %}{% endif %}
{{ head(message.role, loop.last) }} {{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ head('assistant') }}{% endif %}""",
    "answers that are marked": """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<a>' }}{% generation %}{{ message.content }}{{ '</a>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- '<' + message.role[0] + '>' + message.content + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<a>' }}{% endif %}
""",
    "lines that are trimmed": """
    {% for message in messages %}
        {% if message.role == 'user' -%}
            ### Instruction:
            {{ message.content }}

        {% elif message.role == 'assistant' %}
### Response:
{{ message.content ~ eos_token }}
        {% else -%}
            {{ message.content | replace('e', 'E') | default('x', true) }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}
### Response:
    {% endif %}
""",
}

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": ' Hi <b>&"é😀" \n'}],
    "two turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
        {"role": "user", "content": "And\n2+2? "},
        {"role": "assistant", "content": " 4\n"},
    ],
    "a system": [
        {"role": "system", "content": "You are e."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "a call": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Zürich", "n": 1}}}],
        },
        {"role": "tool", "content": "<rain>"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Für <alle> & 'x'"}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def cases():
    """Yields (name of a template, name of a conversation, whether with a generation prompt)."""
    for template in TEMPLATES:
        for conversation in CONVERSATIONS:
            for add_generation_prompt in (False, True):
                yield template, conversation, add_generation_prompt

"""Chat templates that do more than append."""

STRIPPING = """\
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' and not loop.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As the model families do that show a model no earlier thinking of its own."""

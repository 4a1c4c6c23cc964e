"""Applies the chat template of a tokenizer's folder through transformers, which owns such templates and runs them in a sandbox.
Used by targets.py. Nothing here reads the network.
"""

import os
import re

from errors import INPUT, Refused
from files import open_file
from inputs import one_line

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Chat:
    """The chat template beside the tokenizer.json of `tokenizer`, a tokenizer.Tokenizer. Raises Refused."""

    def __init__(self, tokenizer):
        self.folder, name = os.path.split(tokenizer.file)
        if name != "tokenizer.json":
            raise Refused(INPUT, f"{tokenizer.file}: chat templates lie beside a tokenizer.json: name its folder")
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")  # it would tell that there is no PyTorch
        import transformers

        try:
            self.library = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise Refused(INPUT, f"{self.folder} cannot be read by transformers {transformers.__version__}: {one_line(error)}")
        if not self.library.chat_template:
            raise Refused(INPUT, f"{self.folder} has no chat template: chat_template.jinja, or \"chat_template\" in its "
                                 "tokenizer_config.json, is expected")
        self.tokenizer, self.version = tokenizer, transformers.__version__

    def text(self):
        """Returns the templates as one text, which identifies them."""
        template = self.library.chat_template
        return template if isinstance(template, str) else "\0".join(f"{k}\0{v}" for k, v in sorted(template.items()))

    def marks(self, tools):
        """Whether the template itself marks what the assistant writes."""
        try:
            return bool(GENERATION.search(self.library.get_chat_template(None, tools)))
        except ValueError as error:
            raise Refused(INPUT, f"{self.folder}: {one_line(error)}")

    def apply(self, messages, tools, more, where, what="the conversation", **options):
        try:
            return self.library.apply_chat_template(messages, tools=tools, **more, **options)
        except Exception as error:  # a template may raise by itself, and any kind of error by what it does
            kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
            raise Refused(INPUT, f"{where()}: the chat template of {self.folder} refuses {what}: {kind}{one_line(error)}")

    def render(self, messages, tools, more, where, what="the conversation", prompt=False):
        """Returns the text of messages; with `prompt` also what the template writes before an answer."""
        return self.apply(messages, tools, more, where, what, tokenize=False, add_generation_prompt=prompt)

    def encode(self, text, where):
        """Returns the ids of a rendered text, and the characters [begin, end) of each."""
        encoding = self.tokenizer.behind.library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_marked(self, messages, tools, more, where):
        """Returns the ids of messages, and for each whether the template marks it as the assistant's."""
        made = self.apply(messages, tools, more, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids = list(made["input_ids"])
        if max(ids, default=0) >= self.tokenizer.vocab:
            raise Refused(INPUT, f"{where()}: transformers gives the id {max(ids)}, but {self.tokenizer.file} has "
                                 f"{self.tokenizer.vocab} ids: its tokenizer_config.json adds tokens")
        return ids, made["assistant_masks"]

"""Loads the model in a folder with transformers, describes it and generates some text: `text.py FOLDER [PROMPT]`. This is
the last step of docs/tutorials/extend.md; it needs torch and transformers."""

import sys

import transformers


def main(folder, prompt="def "):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {name: sorted(keys) for name, keys in report.items() if keys}
    if wrong:
        raise SystemExit(f"{folder} does not have exactly the weights of its model: {wrong}")
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, {model.config.max_position_embeddings:,} positions")
    print(f"rotary embedding: {model.config.rope_parameters}")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])

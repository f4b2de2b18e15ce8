"""The smallest use of kvstrata: ask about a text that plain vLLM cannot hold in 20 MiB of device KV memory.

Run it from a checkout: python examples/long_prompt.py
"""

from importlib.resources import files
from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "tiny-dsv32"
KVSTRATA = {
    "kv_connector": "KVStrataConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "use_layerwise": True,
        "layerwise_num_shared_buffers": 2,  # layers 1 to 5 share two buffers; layer 0 keeps its own
        "backend": "none",  # no store across requests; the default is "local"
    },
}

if __name__ == "__main__":
    text = files("kvstrata.demo").joinpath("handbook.txt").read_text()
    lines = [line for line in text.splitlines() if line]
    lines.insert(12, "The pass key is 48213.")
    prompt = "<s><|user|>" + "\n".join(lines[:70]) + "\nWhat is the pass key?<|assistant|>"
    llm = LLM(
        model=str(MODEL),
        dtype="float32",
        max_model_len=2048,
        kv_cache_memory_bytes=20 << 20,
        kv_transfer_config=KVSTRATA,  # without this line vLLM says that 2048 tokens do not fit, and stops
        enforce_eager=True,
    )
    print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text)

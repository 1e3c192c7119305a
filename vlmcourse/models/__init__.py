"""An InternVL-family vision-language model in plain PyTorch.

Enters: token ids and image tiles. Leaves: logits. A vision tower (`vit.py`), a projector (`projector.py`) and a
decoder (`decoder.py`) make the whole (`vlm.py`); `generate.py` writes text, `hf.py` reads and writes Hugging Face
folders. Each part is an ordinary module: whatever splits a model over devices is applied to it from outside.
"""

from vlmcourse.models.generate import generate
from vlmcourse.models.vlm import VLM, build_model

__all__ = ["VLM", "build_model", "generate"]

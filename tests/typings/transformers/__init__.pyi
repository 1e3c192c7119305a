# All of transformers is Any to pyright: binding its index of models takes longer than checking this whole project.
from typing import Any

def __getattr__(name: str) -> Any: ...

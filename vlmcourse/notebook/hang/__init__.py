"""Why does my run hang? Who waits where for whom, in cells (the notebook asks) and in scripts (they watch themselves).

In a cell this works by itself. In a script under `torchrun`, call `watch` once at the top:

    from vlmcourse.notebook import hang
    hang.watch("/shared/folder", stall_s=60)

Which module does what, from the ranks to the person: `observer` sees what a rank does (with `places`, the lines of its
stack, and `last_words`, for a rank that compiled code ends), `rank_state` is that as plain data, `listener` and `watch`
hand it over, `situation` puts the ranks side by side, `diagnosis` says it in words, `doctor` asks in time.
"""

from vlmcourse.notebook.hang.watch import watch

__all__ = ["watch"]

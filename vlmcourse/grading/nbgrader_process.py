"""Start nbgrader as `python -m nbgrader` does, in half the time.

nbgrader imports nbformat, that imports jsonschema, and that, where it finds `rfc3987_syntax`, a grammar which takes
seconds to build. It checks the form of web addresses, which no notebook's schema asks for; jsonschema goes on without.
"""

import sys

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # "not installed", for this process alone

from nbgrader.apps.nbgraderapp import main  # noqa: E402

if __name__ == "__main__":
    sys.argv[0] = "nbgrader"
    main()

"""The APIs that agents speak, one file each: ``@dialect("name")`` on a class makes its paths known to the server.

Another package adds one through an entry point of the group ``gymdata.dialects``.
"""

from __future__ import annotations

from gymdata.commands.record.request import Dialect
from gymdata.registry import Registry

#: Classes; the server makes one of each.
DIALECTS: Registry[type[Dialect]] = Registry("dialect", __name__, "gymdata.dialects")
dialect = DIALECTS.register

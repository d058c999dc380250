"""The settings of a run that differ from the defaults, as others may read them.

Folders of the machine that the run was made on are left out of paths; where a run was written and logged to is left out
as a whole.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from dora_rl.apps.config_options import default_of, section_of

if TYPE_CHECKING:
    from pydantic import BaseModel

_PRIVATE = ("out", "logging")
_FOLDERS = re.compile(r"(^|:)~?/(?:[^:/]+/)+([^:/]+)")


def changed_settings(config: BaseModel) -> dict[str, Any]:
    """The tree of the settings that differ from their defaults, or have none."""
    tree = _changed(type(config), None, config)
    public: dict[str, Any] = without_folders({key: value for key, value in tree.items() if key not in _PRIVATE})
    return public


def without_folders(value: Any) -> Any:
    """The value with `/a/b/name` as `name` in its texts."""
    if isinstance(value, dict):
        return {key: without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    return _FOLDERS.sub(r"\1\2", value) if isinstance(value, str) else value


def _changed(kind: type[BaseModel], defaults: BaseModel | None, config: BaseModel) -> dict[str, Any]:
    document = json.loads(config.model_dump_json())
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        value, default = getattr(config, name), default_of(field, defaults, name)
        section = section_of(field)
        if section is not None and value is not None:
            inner = _changed(section, default, value)
            if inner or default is None:
                found[name] = inner
        elif value != default:
            found[name] = document[name]
    return found

"""JSON schemas as tools give them: in standard keywords, with references followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

Schema = Mapping[str, Any]
OF_NAMES = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)
"""Keywords that map names to schemas."""
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords that list schemas."""
IN_PLACE = ("if", "then", "else")
"""Keywords whose schemas describe the same value as the schema around them, on a condition."""
OF_SCHEMAS = (
    *("items", "additionalProperties", "contains", "propertyNames", "not", *IN_PLACE),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems", "contentSchema"),
)
"""Keywords whose value is a schema; `items` lists schemas in older drafts."""
COMBINED = {"$ref", "allOf", "const"}
"""Keywords that `SchemaResolver.expand` replaces: the first two by the keywords of other schemas,
`const` by an `enum` of one value."""
MAX_DEPTH = 8
"""Schemas inside of each other that are searched for types and names."""
JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema_types(schema: Schema) -> list[str]:
    """Return the types that a schema names; none if it names none."""
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def subschemas(schema: Any) -> Iterator[Schema]:
    """Yield a schema and all schemas inside of it, but not those that it refers to."""
    if not isinstance(schema, Mapping):  # `true` and `false` are schemas without keywords
        return
    yield schema
    for key, value in schema.items():
        parts: Sequence[Any] = ()
        if key in OF_NAMES and isinstance(value, Mapping):  # name -> schema
            parts = list(value.values())
        elif key in (*OF_LISTS, *OF_SCHEMAS):
            parts = value if isinstance(value, list) else [value]
        for part in parts:
            yield from subschemas(part)


def map_subschemas(schema: Schema, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with `change` applied to each schema directly inside of it.

    These are the values of keywords such as `properties` (by name), `anyOf` (a list) and `items`.
    """
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in OF_NAMES and isinstance(value, Mapping):
            changed[key] = {name: change(part) for name, part in value.items()}
        elif key in (*OF_LISTS, *OF_SCHEMAS) and isinstance(value, list):
            changed[key] = [change(part) for part in value]
        else:
            changed[key] = change(value) if key in OF_SCHEMAS else value
    return changed


def without_nullable(schema: Any) -> Any:
    """Replace transformers' ``nullable: true`` in a schema by standard keywords.

    Example: ``{"type": "integer", "nullable": True}`` -> ``{"type": ["integer", "null"]}``
    """
    if not isinstance(schema, Mapping):
        return schema
    plain = map_subschemas(schema, without_nullable)
    if plain.pop("nullable", False) is not True:
        return plain
    if "type" in plain:
        types = schema_types(plain)
        plain["type"] = types if "null" in types else [*types, "null"]
    if "const" in plain and "enum" not in plain:
        plain["enum"] = [plain.pop("const")]
    if "enum" in plain and None not in plain["enum"]:
        plain["enum"] = [*plain["enum"], None]
    for key in ("anyOf", "oneOf"):
        if key in plain:
            plain[key] = [*plain[key], {"type": "null"}]
    return {"anyOf": [plain, {"type": "null"}]} if "$ref" in plain else plain


class SchemaResolver:
    """Reads the parts of one schema: follows `$ref` into it, and merges `allOf`.

    `expand` reads one schema at its top. `merged` returns the whole for a reader that knows `$ref`
    but no `allOf`, `inlined` for one that knows no `$ref`.

    The schema is in standard keywords (`without_nullable`). Other documents are never fetched:
    references to them count as schemas that allow any value.
    """

    def __init__(self, schema: Any) -> None:
        self.root = schema
        resource = DRAFT202012.create_resource(schema)
        self._resolver = Registry().resolver_with_root(resource)

    def schemas(self) -> Iterator[Schema]:
        """Yield all schemas that the root holds or refers to."""
        seen: set[int] = set()
        waiting = [self.root]
        while waiting:
            for schema in subschemas(waiting.pop()):
                if id(schema) not in seen:
                    seen.add(id(schema))
                    yield schema
                    if "$ref" in schema:
                        target = self.follow(schema["$ref"])
                        if id(target) not in seen:
                            waiting.append(target)

    def problem(self) -> str | None:
        """Return the reference that leads nowhere, and why; None: all lead to a schema.

        Only the validator follows a `$dynamicRef`, but it would fail at one that leads nowhere.
        """
        for schema in self.schemas():
            for key in ("$ref", "$dynamicRef"):
                reference = schema.get(key)
                if reference is not None and self.follow(reference) is None:
                    return (
                        f"{key}: {reference!r} leads to no part of the schema, and other documents "
                        "are not fetched; write the schema that it means under $defs"
                    )
        return None

    def follow(self, reference: Any) -> Any:
        """Return the schema that a reference leads to, or None."""
        try:
            return self._resolver.lookup(reference).contents
        except (Unresolvable, ValueError, TypeError, AttributeError):
            return None

    def expand(self, schema: Any) -> Schema:
        """Return a schema without `$ref`, `allOf` and `const` at its top, which allows the same.

        Where schemas of `allOf` have the same keyword with values that cannot be joined, the first
        is kept: the result may allow more.

        Example: ``{"allOf": [{"$ref": "#/$defs/Id"}], "const": 3}`` with the definition ``{"type":
        "integer"}`` is ``{"enum": [3], "type": "integer"}``.
        """
        if isinstance(schema, Mapping) and COMBINED.isdisjoint(schema):  # nothing to replace
            return schema
        merged: dict[str, Any] = {}
        for part in self._parts(schema, ()):
            _merge(merged, part)
        return merged

    def _parts(self, schema: Any, followed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield the schemas that hold for a value together, without `$ref`, `allOf` and `const`."""
        if not isinstance(schema, Mapping):
            return
        part = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        if "const" in part:
            constant = part.pop("const")
            part["enum"] = [v for v in part.get("enum", [constant]) if v == constant]
        yield part
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            yield from self._parts(self.follow(reference), (*followed, reference))
        for item in schema.get("allOf") or ():
            yield from self._parts(item, followed)

    def types(self, schema: Any, depth: int = MAX_DEPTH) -> list[str]:
        """Return the JSON types that a schema allows, those of its options included; [] for any."""
        if depth == 0:
            return []
        expanded = self.expand(schema)
        types = schema_types(expanded)
        for option in self.options(expanded):
            types += self.types(option, depth - 1)
        if not types:
            types = [JSON_TYPES.get(type(value), "string") for value in expanded.get("enum", ())]
        return list(dict.fromkeys(types))

    def options(self, expanded: Schema) -> list[Any]:
        """Return the schemas of an expanded schema's `anyOf` and `oneOf`."""
        return [*(expanded.get("anyOf") or ()), *(expanded.get("oneOf") or ())]

    def property_names(self, schema: Any, depth: int = MAX_DEPTH) -> list[str]:
        """Return the names of an object's properties, those of its options and conditions too."""
        if depth == 0:
            return []
        expanded = self.expand(schema)
        names = list(expanded.get("properties") or {})
        conditions = [expanded[key] for key in IN_PLACE if key in expanded]
        dependent = (expanded.get("dependentSchemas") or {}).values()
        for part in (*self.options(expanded), *conditions, *dependent):
            names += self.property_names(part, depth - 1)
        return list(dict.fromkeys(names))

    def with_defaults(self, value: Any, schema: Any = None, depth: int = MAX_DEPTH) -> Any:
        """Return a value whose missing properties have the `default` that the schema gives them.

        `schema` is the part of `root` that describes the value; None: all of `root`. Objects and
        lists more than `depth` levels down stay as they are, which bounds the work.

        Example: ``{"path": "a"}`` -> ``{"path": "a", "all": False}`` for the properties ``{"path":
        {}, "all": {"default": False}}``.
        """
        # Without `$ref` and `allOf`, in which `items`, `properties` and `default` may stand.
        expanded = self.expand(self.root if schema is None else schema)
        if depth == 0:
            return value
        if isinstance(value, list):
            items = expanded.get("items", {})
            return [self.with_defaults(item, items, depth - 1) for item in value]
        properties = expanded.get("properties")
        if not isinstance(value, dict) or not isinstance(properties, Mapping):
            return value
        filled = {
            name: self.with_defaults(item, properties.get(name, {}), depth - 1)
            for name, item in value.items()
        }
        for name, part in properties.items():
            if name not in filled and "default" in (expanded_part := self.expand(part)):
                filled[name] = expanded_part["default"]
        return filled

    def inlined(self, schema: Any = None, within: tuple[str, ...] = ()) -> Any:
        """Return a schema, by default the whole, without references and definitions.

        `within` lists the references whose schemas are being inlined around this one. Raises
        ValueError for a schema that contains itself.
        """
        schema = self.root if schema is None else schema
        if not isinstance(schema, Mapping):
            return schema
        used = {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}
        inlined = map_subschemas(used, lambda part: self.inlined(part, within))
        reference = inlined.pop("$ref", None)
        if reference is None:
            return inlined
        if reference in within:
            name = reference.rpartition("/")[2]
            raise ValueError(f"{name} contains itself, so its schema would have no end")
        target = self.inlined(self.follow(reference), (*within, reference))
        if isinstance(target, bool):  # schemas that allow everything, or nothing
            target = {} if target else {"not": {}}
        # The keywords beside a reference come last: they replace those of its schema.
        return {**target, **inlined}

    def merged(self, schema: Any = None, within: tuple[str, ...] = ()) -> Any:
        """Return a schema, by default the whole, with every `allOf` merged, as `expand` does.

        A schema that contains itself through an `allOf` would be merged into itself without end.
        There the `allOf` becomes a plain `$ref` to that schema, without its other parts, so the
        result may allow more values. `within` lists the references of the `allOf`s that have been
        merged around this schema.

        Example: ``{"allOf": [{"$ref": "#/$defs/Node"}], "title": "Next"}`` inside of the merged
        ``#/$defs/Node`` is ``{"$ref": "#/$defs/Node"}``.
        """
        schema = self.root if schema is None else schema
        if not isinstance(schema, Mapping):
            return schema
        if "allOf" in schema:
            # `expand` replaces these references by their schemas. A `$ref` without an `allOf` stays
            # as it is, and so never repeats its schema.
            expanded = list(_references_in_place(schema))
            repeated = next((reference for reference in expanded if reference in within), None)
            if repeated is not None:
                return {"$ref": repeated}
            schema, within = self.expand(schema), (*within, *expanded)
        return map_subschemas(schema, lambda part: self.merged(part, within))


def _references_in_place(schema: Any) -> Iterator[str]:
    """Yield the references that a schema and its `allOf` make for the same value."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"]
        for part in schema.get("allOf") or ():
            yield from _references_in_place(part)


def _merge(merged: dict[str, Any], part: Schema) -> None:
    """Merge the keywords of `part` into `merged`, so that values have to fit both schemas.

    A keyword that stands in both and is none of those below (`minimum`, say) keeps its value in
    `merged`: the result then allows more.
    """
    for key, value in part.items():
        if key not in merged:
            merged[key] = value
        elif key == "properties":
            properties = {**merged[key]}
            for name, schema in value.items():
                if properties.get(name, schema) != schema:  # both schemas restrict the property
                    schema = {"allOf": [properties[name], schema]}
                properties[name] = schema
            merged[key] = properties
        elif key == "required":
            merged[key] = list(dict.fromkeys([*merged[key], *value]))
        elif key == "enum":
            merged[key] = [member for member in merged[key] if member in value]
        elif key == "type":
            types, others = schema_types(merged), schema_types(part)
            # Every integer is a number: in common with "number", "integer" is "integer".
            common = [t for t in types if t in others or (t == "integer" and "number" in others)]
            common += [t for t in others if t == "integer" and "number" in types]
            # Without a type in common no value would fit: keep the first schema's.
            merged[key] = list(dict.fromkeys(common)) or types

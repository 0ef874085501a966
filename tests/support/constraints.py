"""Constraints as clients send them, as data: published examples of other servers, everyday
expressions, and 40 to be served together.
"""

from typing import Any

ADDRESS = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
ANIMALS: dict[str, Any] = {
    "properties": {
        "location": {"title": "Location", "type": "string"},
        "activity": {"title": "Activity", "type": "string"},
        "animals_seen": {"maximum": 5, "minimum": 1, "title": "Animals Seen", "type": "integer"},
        "animals": {"items": {"type": "string"}, "title": "Animals", "type": "array"},
    },
    "required": ["location", "activity", "animals_seen", "animals"],
    "title": "Animals",
    "type": "object",
}
PERSON: dict[str, Any] = {
    "type": "object",
    "$id": "https://example.com/person.schema.json",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "properties": {
        "firstName": {"type": "string", "description": "first"},
        "lastName": {"type": "string"},
        "hobby": {"type": "string"},
        "numCats": {"type": "integer", "minimum": 0},
    },
    "required": ["firstName", "lastName", "hobby", "numCats"],
}
WEATHER = {
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "temperature": {"type": "integer"}},
    "required": ["unit"],
}
CAR: dict[str, Any] = {
    "$defs": {
        "CarType": {
            "enum": ["SEDAN", "SUV", "TRUCK", "COUPE"],
            "title": "CarType",
            "type": "string",
        }
    },
    "properties": {
        "brand": {"type": "string"},
        "model": {"type": "string"},
        "car_type": {"$ref": "#/$defs/CarType"},
    },
    "required": ["brand", "model", "car_type"],
    "title": "CarDescription",
    "type": "object",
}
JOB = {
    "type": "object",
    "properties": {
        "company": {"type": "string"},
        "duration": {"type": "number", "minimum": 0.0, "maximum": 100.0},
        "position": {"type": "string"},
    },
    "required": ["company", "duration", "position"],
    "additionalProperties": False,
}
EMPLOYEE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3},
        "grade": {"type": "string", "pattern": "^[A-D]$"},
        "email": {"type": "string", "pattern": "^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\\.[a-zA-Z]{2,}$"},
        "work_history": {"type": "array", "items": JOB, "minItems": 0, "maxItems": 3},
    },
    "required": ["name", "age", "skills", "grade", "email", "work_history"],
    "additionalProperties": False,
}
STEPS: dict[str, Any] = {
    "$defs": {
        "Step": {
            "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
            "required": ["explanation", "output"],
            "type": "object",
        }
    },
    "properties": {
        "steps": {"items": {"$ref": "#/$defs/Step"}, "type": "array"},
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "type": "object",
    "additionalProperties": False,
}
TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "multipleOf": 5},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 20}},
    },
    "required": ["score", "tags"],
    "additionalProperties": False,
}
SQL = """
start: select_statement
select_statement: "SELECT" column "from" table "where" condition
column: "col_1" | "col_2"
table: "table_1" | "table_2"
condition: column "=" number
number: "1" | "2"
"""
PUBLISHED: list[tuple[str, Any]] = [
    # text-generation-inference: its guide and its integration tests.
    ("regex", rf"HELLO\.{ADDRESS}\.WORLD\.{ADDRESS}"),
    ("regex", rf"{ADDRESS}\.{ADDRESS}\.{ADDRESS}\.{ADDRESS}"),
    ("regex", r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"),
    ("regex", r"[\w-]+@([\w-]+\.)+[\w-]+"),
    ("json", ANIMALS),
    ("json", PERSON),
    ("json", WEATHER),
    # vLLM: its guide, its example scripts and its tests.
    ("choice", ["positive", "negative"]),
    (
        "choice",
        [
            "Python",
            "Java",
            "JavaScript",
            "C++",
            "C#",
            "PHP",
            "TypeScript",
            "Ruby",
            "Swift",
            "Kotlin",
        ],
    ),
    ("regex", r"\w+@\w+\.com\n"),
    ("regex", r"[a-z0-9.]{1,20}@\w{6,10}\.com\n"),
    ("regex", r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"),
    ("json", CAR),
    ("json", EMPLOYEE),
    ("json", STEPS),
    ("json", TAGS),
    (
        "json",
        {
            "type": "object",
            "properties": {"description": {"type": "string", "minLength": 50, "maxLength": 50}},
        },
    ),
    ("json", {"type": "object"}),
    ("lark", SQL),
]
EVERYDAY = [
    r"(/\w+)+",
    r"(\w+\.)+\w+",
    r"[\w-]+@([\w-]+\.)+[\w-]+",
    r"[\w.+-]+@[\w-]+\.[\w.-]+",
    r"\w+@\w+\.com\n",
    r"https?://[\w.-]+(/[\w./?%&=-]*)?",
    r"(https?|ftp)://[^\s/$.?#].[^\s]*",
    r"\w+( \w+)*",
    r"\w+(, \w+)*\.",
    r"\w{3,20}",
    r"(\w+\s){1,10}\w+[.!?]",
    r"[A-Z]\w*( [A-Z]\w*)+",
    r"#\w+( #\w+)*",
    r"- \w+(\n- \w+)*",
    r"(\w+: .+\n)+",
    r"\w+\(\w+(, \w+)*\)",
    r"/(\w+/)*\w+\.\w{1,4}",
    r"[^\d\s]+",
    r"\S+",
    r".*",
    r".{1,80}",
    r"[^\n]+\n",
    r"(.+\n){3}",
    r"\d{4}-\d{2}-\d{2}",
    r"\+?\d{1,3}[ -]?(\d{2,4}[ -]?){2,4}",
    r"\$\d+(\.\d{2})?",
    r"#[0-9a-fA-F]{6}",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"(yes|no|maybe)",
]


def strings(count: int, fewest: int, most: int) -> dict[str, Any]:
    """An object of long strings, for each character of which the lexer has states."""
    properties = {
        f"text_{i}": {"type": "string", "minLength": fewest, "maxLength": most + i}
        for i in range(count)
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/node",
}
DATES = {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 5}
MIXED: list[tuple[str, Any]] = list(PUBLISHED)
MIXED += [
    ("regex", expression) for expression in EVERYDAY if ("regex", expression) not in PUBLISHED
][:15]
MIXED += [
    ("json", strings(10, 120, 1100)),
    ("json", strings(3, 10, 40)),
    ("json", TREE),
    ("json", DATES),
]
# The compiler refuses these. Tests hand them to the engine directly and expect the same failure
# alone and in a batch. Whether the second fails depends on the first letter that is drawn.
BOMBS = ["(?:a{1,1000}){1000}", "[a-m](?:a{1,1000}){1000}|[n-z]z{1,300}"]

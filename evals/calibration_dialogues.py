"""Makes chats that need no source: arithmetic in steps, reasoning in steps, calls of tools.

Every number is computed, so every answer is right; the same seed gives the same chats.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from fractions import Fraction
from typing import Any

Chat = dict[str, Any]
NAMES = (
    "Amara",
    "Bjorn",
    "Chen",
    "Dilnoza",
    "Elif",
    "Farid",
    "Giulia",
    "Hana",
    "Ines",
    "Jamal",
    "Kwame",
    "Lena",
)
GOODS = (
    "notebooks", "light bulbs", "bags of flour", "bicycle tubes", "tickets", "seedlings", "bolts",
    "jars of honey", "batteries", "umbrellas", "envelopes", "clay tiles",
)  # fmt: skip
PLACES = ("Lagos", "Kraków", "Osaka", "Quito", "Bergen", "Pune", "Tunis", "Valparaíso", "Almaty", "Halifax")


X = "\N{MULTIPLICATION SIGN}"
TIMES = f" {X} "


def user(content: str) -> Chat:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Chat:
    """A message of the assistant."""
    return {"role": "assistant", "content": content}


def arithmetic(rng: random.Random, count: int) -> Iterator[Chat]:
    """Chats about a sum, a product, an equation, a fraction, a date, a word problem, solved in steps."""
    kinds = (
        _addition,
        _product,
        _equation,
        _fractions,
        _date,
        _shop,
        _train,
        _sort,
        _primes,
        _average,
        _bases,
    )
    for i in range(count):
        rounds = rng.choice((1, 1, 2, 3))
        turns: list[Chat] = []
        for _ in range(rounds):
            question, answer = kinds[rng.randrange(len(kinds)) if turns else i % len(kinds)](rng)
            turns += [user(question), assistant(answer)]
        yield {"messages": turns}


def _addition(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1000, 999999), rng.randint(1000, 999999)
    steps, carry, column = [], 0, 1
    left, right = a, b
    while left or right or carry:
        digits = left % 10, right % 10
        total = sum(digits) + carry
        steps.append(f"{column}. {digits[0]} + {digits[1]} + carry {carry} = {total}: write {total % 10}")
        carry, left, right, column = total // 10, left // 10, right // 10, column + 1
    ask = rng.choice(
        ("What is {a} + {b}?", "Add {a} and {b}, column by column.", "Compute {a}+{b}. Show the work.")
    )
    return ask.format(a=a, b=b), "From the right:\n" + "\n".join(steps) + f"\n\nSo {a} + {b} = **{a + b}**."


def _product(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(12, 9999), rng.randint(12, 999)
    parts = [(int(d) * 10**i) for i, d in enumerate(reversed(str(b))) if d != "0"]
    lines = [f"- {a} {X} {part} = {a * part:,}" for part in parts]
    return (
        rng.choice((f"Multiply {a} by {b} without a calculator.", f"{a} * {b} = ?")),
        f"Split {b} into {' + '.join(map(str, parts))}:\n" + "\n".join(lines) + f"\n\nThe sum is {a * b:,}.",
    )


def _equation(rng: random.Random) -> tuple[str, str]:
    x, a, b = rng.randint(-20, 40), rng.randint(2, 15), rng.randint(-30, 30)
    c = a * x + b
    sign = f"+ {b}" if b >= 0 else f"- {-b}"
    move = f"Subtract {b}" if b >= 0 else f"Add {-b}"
    return (
        f"Solve for x: {a}x {sign} = {c}",
        f"{move} on both sides: {a}x = {c - b}.\nDivide by {a}: x = {c - b}/{a} = {x}.\n\n"
        f"Check: {a}·{x} {sign} = {a * x} {sign} = {c}. Correct.",
    )


def _fractions(rng: random.Random) -> tuple[str, str]:
    p, q = Fraction(rng.randint(1, 12), rng.randint(2, 15)), Fraction(rng.randint(1, 12), rng.randint(2, 15))
    common = p.denominator * q.denominator
    left, right = p.numerator * q.denominator, q.numerator * p.denominator
    total = p + q
    return (
        rng.choice((f"What is {p} + {q} as a fraction in lowest terms?", f"Simplify {p} + {q}.")),
        f"Common denominator: {p.denominator} {X} {q.denominator} = {common}.\n"
        f"{p} = {left}/{common} and {q} = {right}/{common}, together {left + right}/{common}.\n"
        f"In lowest terms that is **{total}**, about {float(total):.4f}.",
    )


def _date(rng: random.Random) -> tuple[str, str]:
    start, days = date(2000, 1, 1) + timedelta(rng.randrange(12000)), rng.randint(10, 400)
    end = start + timedelta(days)
    return (
        f"Which day of the week is it {days} days after {start:%d %B %Y}, if that day is a {start:%A}?",
        f"{days} = 7 {X} {days // 7} + {days % 7}, so the weekday moves on by {days % 7}.\n"
        f"Counting {days % 7} from {start:%A} gives **{end:%A}** (it is {end.isoformat()}).",
    )


def _shop(rng: random.Random) -> tuple[str, str]:
    who, what, other = rng.choice(NAMES), *rng.sample(GOODS, 2)
    n, m, price, second, off = (
        rng.randint(2, 30),
        rng.randint(2, 12),
        rng.randint(2, 40),
        rng.randint(3, 60),
        5,
    )
    off *= rng.randint(1, 6)
    total = n * price + m * second
    paid = Fraction(total * (100 - off), 100)
    return (
        f"{who} buys {n} {what} at {price} each and {m} {other} at {second} each, with {off}% off "
        f"everything. How much does {who} pay?",
        f"1. {n} {X} {price} = {n * price}\n2. {m} {X} {second} = {m * second}\n3. Together: {total}\n"
        f"4. Discount: {off}% of {total} is {float(Fraction(total * off, 100)):.2f}\n\n"
        f"{who} pays {float(paid):.2f}.",
    )


def _train(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(PLACES, 2)
    v, w, hours = rng.randint(40, 140), rng.randint(40, 140), rng.randint(1, 9)
    distance = (v + w) * hours
    return (
        f"{a} and {b} are {distance} km apart by road. One truck leaves {a} at {v} km/h, another leaves {b} "
        f"towards it at {w} km/h. When do they meet, and where?",
        f"They approach each other at {v} + {w} = {v + w} km/h.\n{distance} km / {v + w} km/h = {hours} h.\n"
        f"The first truck has then gone {v} {X} {hours} = {v * hours} km, so they meet {v * hours} km "
        f"from {a}, after {hours} hour{'s' if hours > 1 else ''}.",
    )


def _sort(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(-50, 99) for _ in range(rng.randint(5, 8))]
    rows, left = [], list(values)
    done: list[int] = []
    while left:
        least = min(left)
        left.remove(least)
        done.append(least)
        rows.append(f"| {least} | {left} | {done} |")
    table = "| smallest | left | sorted |\n|---|---|---|\n" + "\n".join(rows)
    return f"Sort {values} by selection and show every step in a table.", f"{table}\n\nResult: `{done}`"


def _primes(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(60, 9000)
    left, factors, lines, p = n, [], [], 2
    while p * p <= left:
        if left % p:
            p += 1
            continue
        lines.append(f"{left} / {p} = {left // p}")
        factors.append(p)
        left //= p
    factors.append(left)
    lines.append(f"{left} is prime")
    return f"Factor {n} into primes.", "\n".join(lines) + f"\n\n{n} = {TIMES.join(map(str, factors))}"


def _average(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(1, 60) for _ in range(rng.randint(4, 7))]
    mean = Fraction(sum(values), len(values))
    middle = sorted(values)
    half = len(values) // 2
    median = middle[half] if len(values) % 2 else Fraction(middle[half - 1] + middle[half], 2)
    return (
        f"Give mean and median of {', '.join(map(str, values))}, as JSON.",
        f"Sum {sum(values)} over {len(values)} values: {float(mean):.3f}. Sorted: {middle}.\n\n```json\n"
        + json.dumps({"mean": round(float(mean), 3), "median": float(median)})
        + "\n```",
    )


def _bases(rng: random.Random) -> tuple[str, str]:
    n, base = rng.randint(20, 5000), rng.choice((2, 3, 8, 16))
    digits, left, lines = "", n, []
    while left:
        lines.append(f"{left} = {base} {X} {left // base} + {left % base}")
        digits, left = "0123456789abcdef"[left % base] + digits, left // base
    return f"Write {n} in base {base}.", "\n".join(lines) + f"\n\nRead the remainders upwards: {digits}."


def tool_chats(rng: random.Random, count: int) -> Iterator[Chat]:
    """Chats in which the assistant calls a tool, reads its answer and replies."""
    makers: tuple[Callable[[random.Random], tuple[Chat, str, Chat, object, str]], ...] = (
        _weather, _currency, _search, _query, _calendar,
    )  # fmt: skip
    for i in range(count):
        tool, question, call, answer, reply = makers[i % len(makers)](rng)
        others = [maker(rng)[0] for maker in rng.sample(makers, 2)]
        tools = {t["function"]["name"]: t for t in (tool, *others)}
        name = tool["function"]["name"]
        calling = {"type": "function", "function": {"name": name, "arguments": call}}
        yield {
            "messages": [
                user(question),
                {"role": "assistant", "content": "", "tool_calls": [calling]},
                {"role": "tool", "name": name, "content": json.dumps(answer, ensure_ascii=False)},
                assistant(reply),
            ],
            "tools": [tools[key] for key in sorted(tools)],
        }


def _tool(name: str, does: str, **parameters: str) -> Chat:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": schema}}


def _weather(rng: random.Random) -> tuple[Chat, str, Chat, object, str]:
    place, high, rain = rng.choice(PLACES), rng.randint(-8, 38), rng.randint(0, 100)
    tool = _tool("get_forecast", "Forecast for a city, in degrees Celsius.", city="string", days="integer")
    found = {"city": place, "daily": [{"high": high, "low": high - rng.randint(3, 11), "rain_chance": rain}]}
    advice = "Take an umbrella." if rain > 50 else "No umbrella needed."
    return (
        tool, f"Do I need an umbrella in {place} tomorrow?", {"city": place, "days": 1}, found,
        f"In {place} it will be up to {high} °C with a {rain} % chance of rain. {advice}",
    )  # fmt: skip


def _currency(rng: random.Random) -> tuple[Chat, str, Chat, object, str]:
    a, b = rng.sample(("EUR", "JPY", "NGN", "BRL", "PLN", "INR", "KES"), 2)
    amount, rate = rng.randint(5, 900), round(rng.uniform(0.01, 90), 4)
    tool = _tool(
        "convert_currency",
        "Convert an amount at today's rate.",
        amount="number",
        source="string",
        target="string",
    )
    return (
        tool, f"How much is {amount} {a} in {b}?", {"amount": amount, "source": a, "target": b},
        {"rate": rate, "result": round(amount * rate, 2)},
        f"{amount} {a} are {amount * rate:,.2f} {b} at a rate of {rate}.",
    )  # fmt: skip


def _search(rng: random.Random) -> tuple[Chat, str, Chat, object, str]:
    word = rng.choice(("timeout", "retry", "checksum", "locale", "deprecated"))
    files = [
        f"{rng.choice(('src', 'lib', 'tests'))}/{rng.choice(('io', 'net', 'cache', 'main'))}_{i}.py"
        for i in range(3)
    ]
    hits = [{"path": path, "line": rng.randint(1, 400)} for path in files]
    tool = _tool(
        "search_code", "Find a pattern in the files of the repository.", pattern="string", glob="string"
    )
    listed = "\n".join(f"- `{hit['path']}` line {hit['line']}" for hit in hits)
    return (
        tool, f"Where does the code mention {word}?", {"pattern": word, "glob": "**/*.py"}, {"hits": hits},
        f"There are {len(hits)} places:\n\n{listed}",
    )  # fmt: skip


def _query(rng: random.Random) -> tuple[Chat, str, Chat, object, str]:
    what, year = rng.choice(GOODS), rng.randint(2015, 2030)
    rows = [{"month": month, "sold": rng.randint(0, 900)} for month in range(1, 5)]
    sql = (
        f"SELECT month, SUM(quantity) AS sold FROM sales WHERE product = '{what}' AND year = {year} "
        "GROUP BY month ORDER BY month LIMIT 4"
    )
    tool = _tool("run_sql", "Run a read-only query on the shop's database.", query="string")
    best = max(rows, key=lambda row: row["sold"])
    table = "| month | sold |\n|---|---|\n" + "\n".join(f"| {r['month']} | {r['sold']} |" for r in rows)
    return (
        tool, f"How many {what} did we sell per month at the start of {year}?", {"query": sql},
        {"rows": rows},
        f"{table}\n\nMonth {best['month']} was the best with {best['sold']}.",
    )  # fmt: skip


def _calendar(rng: random.Random) -> tuple[Chat, str, Chat, object, str]:
    who, day = rng.choice(NAMES), date(2026, 1, 1) + timedelta(rng.randrange(700))
    hour = rng.randint(8, 17)
    tool = _tool(
        "create_event", "Put an event into the calendar.", title="string", start="string", minutes="integer"
    )
    start = f"{day.isoformat()}T{hour:02}:30"
    return (
        tool, f"Schedule half an hour with {who} on {day:%d %B %Y} at {hour}:30.",
        {"title": f"Meeting with {who}", "start": start, "minutes": 30},
        {"id": f"evt_{rng.getrandbits(32):08x}", "status": "confirmed"},
        f"Done: you meet {who} on {day:%A, %d %B %Y}, {hour:02}:30 to {hour + 1:02}:00.",
    )  # fmt: skip


def queries(rng: random.Random, count: int) -> Iterator[str]:
    """SQL of tables, indexes and queries about made-up shops."""
    for _ in range(count):
        table, other = rng.sample(("orders", "customers", "stock", "invoices", "shipments", "products"), 2)
        columns = rng.sample(("city", "price", "created_at", "status", "quantity", "weight_kg", "email"), 4)
        kinds = {
            "price": "NUMERIC(10, 2)",
            "created_at": "TIMESTAMP",
            "quantity": "INTEGER",
            "weight_kg": "REAL",
        }
        fields = ",\n".join(f"    {c} {kinds.get(c, 'TEXT')} NOT NULL" for c in columns)
        low = rng.randint(1, 500)
        yield (
            f"CREATE TABLE {table} (\n    id INTEGER PRIMARY KEY,\n    {other}_id INTEGER REFERENCES {other} "
            f"(id),\n{fields}\n);\nCREATE INDEX {table}_{columns[0]} ON {table} ({columns[0]});\n\n"
            f"SELECT o.{columns[1]}, COUNT(*) AS n, AVG(t.{columns[2]})\nFROM {table} AS t\n"
            f"JOIN {other} AS o ON o.id = t.{other}_id\nWHERE t.id > {low} AND t.{columns[3]} IS NOT NULL\n"
            f"GROUP BY o.{columns[1]}\nHAVING COUNT(*) > {rng.randint(1, 20)}\nORDER BY n DESC\n"
            f"LIMIT {rng.randint(5, 50)};\n"
        )


def records(rng: random.Random, count: int) -> Iterator[str]:
    """JSON, YAML and CSV of made-up shipments."""
    for i in range(count):
        rows = [
            {
                "id": rng.randrange(10**6),
                "to": rng.choice(PLACES),
                "items": [{"sku": f"{rng.choice('ABCDEF')}-{rng.randint(100, 999)}", "n": rng.randint(1, 9)}],
                "weight": round(rng.uniform(0.1, 40), 2),
                "express": rng.random() < 0.3,
                "note": rng.choice((None, "fragile", f"for {rng.choice(NAMES)}")),
            }
            for _ in range(rng.randint(3, 6))
        ]
        if i % 3 == 0:
            yield json.dumps({"shipments": rows, "total": len(rows)}, indent=2, ensure_ascii=False) + "\n"
        elif i % 3 == 1:
            yield "".join(
                f"- id: {r['id']}\n  to: {r['to']}\n  weight: {r['weight']}\n"
                f"  express: {str(r['express']).lower()}\n"
                for r in rows
            )
        else:
            lines = [f"{r['id']},{r['to']},{r['weight']},{int(bool(r['express']))}" for r in rows]
            yield "id,to,weight,express\n" + "\n".join(lines) + "\n"

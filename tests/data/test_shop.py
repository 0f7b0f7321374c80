"""The bundled tasks, their demonstrations and the script that makes a new model."""

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agenttrain.data.bundled import calculator, demonstrations, shop

ROOT = Path(__file__).resolve().parents[2]
SPLITS = tuple(shop.DATABASE_SEEDS)


def rows_of(data, split, count, **arguments):
    return [data.row(split, index, **arguments) for index in range(count)]


def tables(row):
    """Read a row's whole database into plain Python."""
    connection = shop.connect(row)
    customers = dict(connection.execute("SELECT name, city FROM customers"))
    products = {name: rest for name, *rest in connection.execute("SELECT * FROM products")}
    orders = {number: rest for number, *rest in connection.execute("SELECT * FROM orders")}
    connection.close()
    return customers, products, orders


def named(row, names):
    """Return the one of `names` that the question mentions."""
    question = row["messages"][0]["content"].replace("?", " ").replace(".", " ").split()
    (found,) = [name for name in names if str(name) in question]
    return found


def recomputed(row):
    """Answer a question from the tables without any SQL of ours."""
    customers, products, orders = tables(row)
    family = row["family"]
    if family.startswith("order_"):
        customer, product, _ = orders[named(row, orders)]
    elif family == "last_price":
        name = named(row, customers)
        product = orders[max(o for o, (who, _, _) in orders.items() if who == name)][1]
    elif family == "last_city":
        name = named(row, products)
        customer = orders[max(o for o, (_, what, _) in orders.items() if what == name)][0]
    elif family in ("price", "stock", "sold", "orders_with"):
        product = named(row, products)
    elif family in ("city", "orders", "bought", "neighbours"):
        customer = named(row, customers)
    if family in ("price", "order_price", "last_price"):
        return products[product][0]
    if family in ("stock", "order_stock"):
        return products[product][1]
    if family in ("city", "order_city", "last_city"):
        return customers[customer]
    if family in ("orders", "order_orders"):
        return sum(who == customer for who, _, _ in orders.values())
    if family == "bought":
        return sum(quantity for who, _, quantity in orders.values() if who == customer)
    if family == "sold":
        return sum(quantity for _, what, quantity in orders.values() if what == product)
    if family == "orders_with":
        return sum(what == product for _, what, _ in orders.values())
    city = named(row, shop.CITIES) if family == "customers" else customers[customer]
    return sum(where == city for where in customers.values())


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_the_truth_of_its_database(split):
    rows = rows_of(shop, split, 250, seed=0)
    assert [row["answer"] for row in rows] == [str(recomputed(row)) for row in rows]
    assert {row["family"] for row in rows} == {family.name for family in shop.FAMILIES}
    assert {row["hops"] for row in rows} == {1, 2, 3}


@pytest.mark.parametrize("data", [shop, calculator])
def test_a_row_is_the_same_alone_as_in_sequence(data):
    rows = rows_of(data, "train", 40, seed=3)
    assert [data.row("train", index, seed=3) for index in (39, 0, 17)] == [
        rows[index] for index in (39, 0, 17)
    ]
    assert rows != rows_of(data, "train", 40, seed=4)
    assert rows == json.loads(json.dumps(rows))
    assert len({row["task_id"] for row in rows}) == 40


def test_splits_share_no_database():
    seeds = {split: set(shop.DATABASE_SEEDS[split]) for split in ("train", "tune", "test")}
    for one, other in itertools.combinations(seeds.values(), 2):
        assert not one & other
    for split in SPLITS:
        drawn = {row["database_seed"] for row in rows_of(shop, split, 200, seed=1)}
        assert drawn <= set(shop.DATABASE_SEEDS[split])
        assert len(drawn) > 100


def test_each_family_has_enough_phrasings_and_holds_some_out():
    for family in shop.FAMILIES:
        seen = shop.phrasings(family, held_out=False)
        held_out = shop.phrasings(family, held_out=True)
        assert len(set(seen)) == 12
        assert len(set(held_out)) == 4
        assert not set(seen) & set(held_out)


@pytest.mark.parametrize(
    ("split", "held_out"),
    [("train", False), ("tune", False), ("test", False), ("test_phrasing", True)],
)
def test_a_split_asks_in_its_own_phrasings_only(split, held_out):
    fixed = {"name": "Kim", "product": "lamp", "city": "Oslo", "order": 7}
    words = {name: str(value) for name, value in fixed.items()}
    allowed = {
        phrasing.format(**words)
        for family in shop.FAMILIES
        for phrasing in shop.phrasings(family, held_out)
    }
    asked = set()
    for row in rows_of(shop, split, 400, seed=2):
        question = row["messages"][0]["content"]
        for word in question.replace("?", "").replace(".", "").split():
            if word in shop.NAMES:
                question = question.replace(word, "Kim")
            elif word in shop.PRODUCTS:
                question = question.replace(word, "lamp")
            elif word in shop.CITIES:
                question = question.replace(word, "Oslo")
            elif word.isdigit():
                question = question.replace(word, "7")
        asked.add(question)
    assert asked <= allowed


def test_a_curriculum_changes_the_mix_at_its_row():
    curriculum = [(0, [1, 0, 0]), (30, [0, 0.5, 0.5])]
    hops = [row["hops"] for row in rows_of(shop, "train", 60, seed=0, curriculum=curriculum)]
    assert set(hops[:30]) == {1}
    assert set(hops[30:]) == {2, 3}


@pytest.mark.parametrize("data", [shop, calculator])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"split": "validation"}, "split='validation': must be one of train, tune, test"),
        ({"split": "train", "curriculum": []}, "from row 0 on"),
        ({"split": "train", "curriculum": [(5, [1, 0, 0])]}, "from row 0 on"),
        ({"split": "train", "curriculum": [(0, [1])]}, "shares"),
    ],
)
def test_a_row_says_which_setting_cannot_work(data, setting, message):
    with pytest.raises(ValueError, match=message):
        data.row(index=0, seed=0, **setting)


def test_a_database_is_fresh_at_every_connect():
    row = shop.row("train", 0, seed=0)
    first = shop.connect(row)
    first.execute("DELETE FROM orders")
    first.close()
    second = shop.connect(row)
    assert second.execute("SELECT COUNT(*) FROM orders").fetchone() == (60,)
    second.close()


@pytest.mark.parametrize("split", SPLITS)
def test_calculator_answers_and_numbers_hold(split):
    for row in rows_of(calculator, split, 200, seed=0):
        total = row["start"]
        for name, number in row["steps"]:
            total = {"add": total + number, "subtract": total - number}.get(name, total * number)
        assert row["answer"] == str(total)
        assert row["hops"] == len(row["steps"])


def test_calculator_splits_share_no_numbers():
    def numbers(split):
        rows = rows_of(calculator, split, 1500, seed=0)
        return {(row["start"], *map(tuple, row["steps"])) for row in rows}

    for one, other in itertools.combinations(("train", "tune", "test"), 2):
        assert not numbers(one) & numbers(other)
    assert not set(calculator.phrasings(held_out=True)) & set(calculator.phrasings(held_out=False))


def test_a_demonstration_calls_with_what_came_before():
    faultless = demonstrations.Habits(
        give_up=0.0, follow_chain=1.0, confuse=0.0, misname=0.0, miscopy=0.0
    )
    for row in rows_of(shop, "train", 60, seed=0):
        messages = demonstrations.shop_demonstration(row, random.Random(0), faultless)
        assert len(messages) == 2 * row["hops"] + 1
        (final,) = messages[-1]["tool_calls"]
        assert final["function"] == {"name": "final_answer", "arguments": {"answer": row["answer"]}}
    for row in rows_of(calculator, "train", 60, seed=0):
        messages = demonstrations.calculator_demonstration(row, random.Random(0), faultless)
        (final,) = messages[-1]["tool_calls"]
        assert final["function"]["arguments"] == {"answer": row["answer"]}


def test_demonstrators_hardly_ever_finish_a_chain():
    draw = random.Random(0)
    finished = Counter()
    chained = [row for row in rows_of(shop, "train", 2000, seed=0) if row["hops"] > 1]
    for row in chained:
        messages = demonstrations.shop_demonstration(row, draw)
        (final,) = messages[-1]["tool_calls"]
        finished[final["function"]["arguments"]["answer"] == row["answer"]] += 1
    assert 0.01 < finished[True] / len(chained) < 0.15


def test_demonstrations_are_rows_whose_first_ones_rarely_give_up():
    def gives_up(index):
        *_, last = demonstrations.row("shop", "train", index, 0, early=300)["messages"]
        (final,) = last["tool_calls"]
        return final["function"]["arguments"] == {"answer": "unknown"}

    # 10 % at first and 35 % later, and half of the misnamed queries
    assert sum(map(gives_up, range(300))) / 300 < 0.2
    assert 0.28 < sum(map(gives_up, range(300, 600))) / 300 < 0.48
    assert demonstrations.row("shop", "train", 7, 0) == demonstrations.row("shop", "train", 7, 0)
    with pytest.raises(ValueError, match="task='chess': must be one of shop, calculator, sight"):
        demonstrations.row("chess", "train", 0, 0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("shop", ["--task", "shop"], marks=pytest.mark.slow),
        pytest.param("shop_hybrid", ["--task", "shop", "--hybrid"], marks=pytest.mark.slow),
        pytest.param("sight", ["--task", "sight"], marks=pytest.mark.slow),
    ],
)
def test_a_new_model_is_a_folder_like_the_shipped_ones(tmp_path, model, words):
    command = [sys.executable, ROOT / "scripts/new_model.py", "--out", tmp_path / "blank"]
    subprocess.run([*command, *words, "--count", "200"], check=True, cwd=tmp_path)
    shipped = ROOT / "agenttrain/data/models" / model
    made = {path.name for path in (tmp_path / "blank").iterdir()}
    assert made == {path.name for path in shipped.iterdir()} - {"recipe.json"}
    template = "chat_template.jinja"
    assert (tmp_path / "blank" / template).read_text() == (shipped / template).read_text()
    sizes, shipped_sizes = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "blank", shipped)
    )
    keys = ("model_type", "hidden_size", "layer_types", "intermediate_size", "head_dim")
    assert [sizes.get(key) for key in keys] == [shipped_sizes.get(key) for key in keys]


def test_the_shipped_model_is_whole_and_small():
    shipped = ROOT / "agenttrain/data/models"
    models = sorted(path.parent for path in shipped.glob("*/model.safetensors"))
    assert [model.name for model in models] == ["calculator", "shop", "shop_hybrid", "sight"]
    for model in models:
        assert json.loads((model / "recipe.json").read_text())["parameters"] < 700_000
        assert (model / "model.safetensors").stat().st_size < 1.31e6

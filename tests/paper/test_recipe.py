import re

import pytest

from kernelhead import active
from kernelhead.backbones import create_backbone
from kernelhead.data.cifar import NAMES
from kernelhead.heads import create_head
from kernelhead.paper import EXPERIMENTS, labelling
from kernelhead.paper.recipe import Protocol, Recipe, Subset, adapted, paper_number, paper_numbers
from kernelhead.paper.runner import chosen_recipes

# The paper's tables, typed a second time: columns first, then a line a row, its name before the colon.
TABLES = {
    "cifar10": """
        SM/LIN/SOP/KER/Ours
        ResNet-8:  83.73 82.45 84.03 85.15 86.93
        ResNet-14: 89.87 90.16 90.47 90.41 91.48
        ResNet-20: 91.14 91.01 91.75 91.34 92.88
        ResNet-32: 92.22 92.21 92.31 92.41 93.70
        ResNet-44: 92.10 93.10 92.42 92.87 94.05
        ResNet-56: 93.01 93.13 93.33 93.09 94.15""",
    "cifar100": """
        SM/LIN/SOP/KER/Ours
        ResNet-8:  53.82 54.00 55.80 56.86 58.27
        ResNet-14: 63.85 63.67 63.53 64.14 66.67
        ResNet-20: 65.99 65.79 67.97 67.31 69.33
        ResNet-32: 68.96 69.16 70.39 69.40 71.30
        ResNet-44: 70.16 70.54 71.13 71.09 73.20
        ResNet-56: 71.23 72.11 73.12 72.39 74.10""",
    "transfer": """
        SM/LIN/SOP/Ours
        Oxford-IIIT Pets: 92.06 91.99 92.28 93.56
        Stanford Cars:    90.78 90.83 91.04 92.60""",
    "distillation": """
        SM/Ours
        CIFAR-10:  76.06 79.85
        CIFAR-100: 44.38 46.48""",
    "active": """
        SM random/SM margin/SM k-center/Ours random/Ours margin/Ours k-center
        30 %: 58.03 58.88 58.41 61.66 61.80 63.08
        40 %: 61.05 61.81 62.02 65.25 66.28 66.35
        50 %: 64.81 65.36 65.47 67.17 68.14 69.41
        60 %: 66.26 67.03 68.25 69.17 70.61 70.10
        70 %: 67.47 69.16 69.84 70.06 70.90 71.50
        80 %: 69.59 69.47 71.25 71.66 72.21 72.64
        90 %: 70.25 71.41 71.11 72.60 73.90 73.14""",
    "kernels": """
        Accuracy
        Gaussian RBF kernel: 73.21
        Polynomial kernel:   73.16
        Learned kernel:      74.10""",
    "rectification": """
        SM/Ours
        rectified features:   70.96 71.61
        unrectified features: 71.23 74.10""",
    "activations": """
        Accuracy
        sigmoid: 74.96
        softmax: 73.69
        relu:    74.10
        none:    unstable""",
}
BEYOND = ("landmarks", "saturation", "beyond", "mixup")
CELLS = {
    "cifar10": 30,
    "cifar100": 30,
    "transfer": 8,
    "distillation": 4,
    "active": 42,
    "kernels": 3,
    "rectification": 4,
    "activations": 4,
}


def typed(name):
    """{(row, column): text} of a table."""
    head, *lines = TABLES[name].strip().splitlines()
    cells = {}
    for line in lines:
        row, numbers = line.split(":")
        for column, number in zip(head.split("/"), numbers.split(), strict=True):
            cells[row.strip(), column] = number
    return cells


def cell_of(table, row, column):
    (cell,) = [cell for cell in EXPERIMENTS[table].cells if (cell.row, cell.column) == (row, column)]
    return cell


def all_recipes():
    """Every recipe of every table, those that others build on with them."""
    found = []

    def add(recipe):
        if recipe is not None:
            found.append(recipe)
            for other in (recipe.teacher, recipe.seed_model, recipe.chosen_as):
                add(other)

    for experiment in EXPERIMENTS.values():
        for cell in experiment.cells:
            add(cell.recipe)
    return found


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_has_the_papers_number(name):
    experiment = EXPERIMENTS[name]
    assert len({(cell.row, cell.column) for cell in experiment.cells}) == len(experiment.cells)
    cells = {}
    for cell in experiment.cells:
        number = paper_number(name, cell)
        if number is None:
            assert cell.column.endswith(("ResNet-20", "EXP", "Best"))
        else:
            cells[(cell.published or (name, cell.row, cell.column))[1:]] = number
    assert len(cells) == CELLS[name]
    shown = {place: number if isinstance(number, str) else f"{number:.2f}" for place, number in cells.items()}
    assert shown == typed(name)


def test_there_is_no_number_without_a_cell():
    assert list(EXPERIMENTS) == [*TABLES, *BEYOND]
    assert set(paper_numbers()) == {"synthetic", *TABLES}
    assert paper_numbers()["synthetic"]["rows"] == {"softmax": [85.51], "kernel": [94.2], "bayes": [95.06]}
    for number, name in enumerate(["synthetic", *TABLES], 1):
        assert paper_numbers()[name]["where"] == f"Table {number}"
        if name in EXPERIMENTS:
            assert f"Table {number})" in EXPERIMENTS[name].title
            assert sum(len(row) for row in paper_numbers()[name]["rows"].values()) == CELLS[name]


def test_keys_tell_recipes_apart_and_are_names_of_folders():
    by_key = {}
    for recipe in all_recipes():
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", recipe.key)  # what every file system takes, with room for more
        # What is trained differs exactly where the key does; where its rate was chosen is no part of it.
        same = by_key.setdefault((recipe.data, recipe.key), recipe)
        assert (same.backbone, same.backbone_options) == (recipe.backbone, recipe.backbone_options)
        assert (same.head, same.head_options) == (recipe.head, recipe.head_options)
        assert (same.mixup, same.subset, same.teacher) == (recipe.mixup, recipe.subset, recipe.teacher)
    lower = [(data, key.lower()) for data, key in by_key]
    assert len(set(lower)) == len(lower)  # some file systems do not tell a from A
    # 2 CIFAR tables, transfer, distillation, 84 subsets and a control and the seed models, what the ablations add with
    # two depths,
    papers = 30 + 30 + 12 + 8 + 87 + 2 * (2 + 2 + 3)
    # what `landmarks` adds but softmax, second-order pooling and the paper's layer, then `saturation` but two of
    # these, 512 landmarks or channels and 2048 of either with and without dropout, `beyond`: two more
    # heads at six depths of two data sets, four of them above, and `mixup`.
    assert len(by_key) == papers + 2 * (39 - 3) + (32 - 8) + (2 * 12 - 4) + 30


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Recipe("d", "b", "h"), Recipe("d", "b", "h", {"rectified": True})),
        (Recipe("d", "b", "h"), Recipe("d", "b", "h", {}, {"kernel": "rbf"})),
        (Recipe("d", "b", "h", {}, {"degree": 9}), Recipe("d", "b", "h", {}, {"degree": 10})),
        (Recipe("d", "b", "h"), Recipe("d", "b", "h", subset=Subset("margin", 30))),
        (Recipe("d", "b", "h", subset=Subset("k-center", 30)), Recipe("d", "b", "h", subset=Subset("margin", 30))),
        (Recipe("d", "b", "h"), Recipe("d", "b", "h", teacher=Recipe("d", "b", "h"))),
    ],
)
def test_every_part_of_a_recipe_is_in_its_key(one, other):
    assert one.key != other.key


def test_ablations_share_runs_with_the_table_of_cifar100():
    softmax, ours = (cell_of("cifar100", "ResNet-56", column).recipe for column in ("SM", "Ours"))
    for table, row, column, whole in (
        ("kernels", "Learned kernel", "ResNet-56", ours),
        ("rectification", "unrectified features", "SM ResNet-56", softmax),
        ("rectification", "unrectified features", "Ours ResNet-56", ours),
        ("activations", "relu", "ResNet-56", ours),
    ):
        assert cell_of(table, row, column).recipe == whole
    for cell in EXPERIMENTS["distillation"].cells:
        table = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}[cell.row]
        assert cell.recipe.teacher == cell_of(table, "ResNet-56", "SM").recipe
        assert cell.recipe.backbone == "lenet5"
    for cell in EXPERIMENTS["active"].cells:
        row = cell.column.split()[-1]
        whole = {head: cell_of("cifar100", row, head).recipe for head in ("SM", "LIN", "Ours")}
        assert cell.recipe.chosen_as == whole[cell.column.split()[0]]
        softmax, seed_model = whole["SM"], cell.recipe.seed_model
        assert seed_model.backbone == cell.recipe.backbone == softmax.backbone
        assert (seed_model.head, seed_model.subset, seed_model.chosen_as) == (
            "softmax",
            Subset("random", 10),
            softmax,
        )


@pytest.mark.parametrize("name", TABLES)
def test_baselines(name):
    experiment = EXPERIMENTS[name]
    for cell in experiment.cells:
        baseline = experiment.baseline(cell)
        if cell.column.split()[0] == "SM":
            assert baseline is None
            assert cell.recipe.head == "softmax"
            continue
        table, other = baseline
        if name in ("kernels", "activations"):
            assert (table, other) == ("cifar100", cell_of("cifar100", cell.column, "SM"))
        else:
            expected = re.sub(r"^\w+", "SM", cell.column)
            assert (table, other) == (name, cell_of(name, cell.row, expected))
        # The baseline differs in the head, for KER in the first convolution, and in nothing else.
        ours, theirs = cell.recipe, other.recipe
        assert (theirs.head, theirs.data, theirs.backbone) == ("softmax", ours.data, ours.backbone)
        assert (theirs.subset, theirs.teacher, theirs.seed_model) == (ours.subset, ours.teacher, ours.seed_model)
        kervolution = {"kervolution": "first"} if cell.column == "KER" else {}
        assert ours.backbone_options == {**theirs.backbone_options, **kervolution}


def test_heads_and_options_are_the_papers():
    for name in ("cifar10", "cifar100"):
        for row in (8, 56):
            heads = {c: cell_of(name, f"ResNet-{row}", c).recipe.head for c in ("SM", "LIN", "SOP", "KER", "Ours")}
            assert list(heads.values()) == ["softmax", "linear", "second_order", "softmax", "kernel"]
            assert cell_of(name, f"ResNet-{row}", "Ours").recipe.backbone == f"cifar_resnet{row}"
    assert cell_of("kernels", "Polynomial kernel", "ResNet-56").recipe.head_options["degree"] == 10
    assert cell_of("kernels", "Gaussian RBF kernel", "ResNet-56").recipe.head_options == {"kernel": "rbf"}
    for row in ("sigmoid", "softmax", "none"):
        assert cell_of("activations", row, "ResNet-56").recipe.head_options == {"coefficients": row}
    ours = cell_of("activations", "relu", "ResNet-56").recipe
    assert len(create_head(ours.head, 64, 100, **ours.head_options).alpha) == 10
    assert create_head("kernel", 64, 100, coefficients="sigmoid").temperature == 0.1
    assert create_head("kernel", 64, 100, coefficients="softmax").temperature == 0.005


def test_every_recipe_can_be_built():
    built = set()
    for recipe in all_recipes():
        options = {name: value for name, value in recipe.backbone_options.items() if name != "pretrained"}
        kind = recipe.backbone, str(options), recipe.head, str(recipe.head_options)
        if kind in built or (recipe.head == "second_order" and recipe.backbone == "resnet50"):  # 800 million weights
            continue
        built.add(kind)
        backbone = create_backbone(recipe.backbone, **options)
        create_head(recipe.head, backbone.num_features, len(NAMES.get(recipe.data, range(37))), **recipe.head_options)


def test_protocols():
    for name, experiment in EXPERIMENTS.items():
        paper, tuned = experiment.protocols["paper"], experiment.protocols["tuned"]
        assert (paper.name, tuned.name) == ("paper", "tuned")
        assert paper.batch_size == tuned.batch_size == (64 if name == "transfer" else 128)
        assert paper.weight_decays == (1e-4,)
        assert paper.head_rates == (1.0,)
        if name == "transfer":
            assert (tuned.weight_decays, tuned.head_rates) == ((1e-4,), (1.0, 10.0))
            assert set(paper.candidates()).intersection(tuned.candidates())  # which share their runs
        else:
            assert (tuned.weight_decays, tuned.head_rates) == ((1e-4, 5e-4), (1.0,))
            assert paper.learning_rates == tuned.learning_rates
        rates = (0.05, 0.1, 0.3) if name in ("landmarks", "saturation") else (0.05, 0.1, 0.3, 1.0)
        if name == "distillation":  # of the students; their teachers are those of the CIFAR tables
            assert paper.base == EXPERIMENTS["cifar10"].protocols["paper"] == EXPERIMENTS["cifar100"].protocols["paper"]
            rates = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
        else:
            assert (paper.base, tuned.base) == (paper, tuned)
        assert (len(paper.candidates()), len(tuned.candidates())) == (len(rates), 2 * len(rates))
        if name != "transfer":
            assert paper.learning_rates == rates
    pairs = [(1.0, 0.1, 1.0), (2.0, 0.1, 1.0), (1.0, 0.2, 1.0), (2.0, 0.2, 1.0)]
    assert Protocol("p", (1.0, 2.0), (0.1, 0.2), 8).candidates() == pairs
    several = Protocol("p", (1.0, 2.0), (0.1,), 8, head_rates=(1.0, 10.0))
    assert several.candidates() == [(1.0, 0.1, 1.0), (2.0, 0.1, 1.0), (1.0, 0.1, 10.0), (2.0, 0.1, 10.0)]
    assert [str(candidate) for candidate in several.candidates()[1:3]] == ["2, 0.1", "1, 0.1, head x10"]
    quick = adapted(paper, True)
    assert quick.learning_rates == paper.learning_rates[:2]
    assert adapted(paper, False) is paper
    assert adapted(EXPERIMENTS["distillation"].protocols["paper"], True).base.learning_rates == (0.05, 0.1)


@pytest.mark.parametrize(
    ("table", "only", "count"),
    [
        ("cifar10", [], 30),
        ("cifar10", ["ResNet-20"], 5),
        ("cifar10", ["Ours", "SM"], 12),
        ("cifar10", ["ResNet-20", "ResNet-8", "Ours"], 2),
        ("active", ["SM"], 42),
        ("active", ["margin"], 28),
        ("active", ["margin", "ResNet-56"], 14),
        ("active", ["margin", "random", "SM", "ResNet-56"], 14),
        ("active", ["30 %", "Ours k-center ResNet-20"], 1),
        ("activations", ["none", "relu"], 4),
        ("activations", ["none", "relu", "ResNet-20"], 2),
        ("beyond", ["CIFAR-100", "Best", "SM", "ResNet-8", "ResNet-20"], 4),
    ],
)
def test_rows_and_columns_by_name(table, only, count):
    recipes = chosen_recipes(EXPERIMENTS[table], only)
    assert len({recipe.key for recipe in recipes}) == len(recipes) == count


def test_an_unknown_row_is_refused():
    with pytest.raises(ValueError, match="cifar10 has no row or column 'ResNet-9'; it has KER, LIN, Ours, ResNet-14"):
        chosen_recipes(EXPERIMENTS["cifar10"], ["SM", "ResNet-9"])


def test_names_that_no_cell_has_together_are_refused():
    with pytest.raises(ValueError, match="beyond has no cell that is all of 'SM CIFAR-100', 'CIFAR-10'"):
        chosen_recipes(EXPERIMENTS["beyond"], ["SM CIFAR-100", "CIFAR-10"])
    with pytest.raises(ValueError, match="expansion, 'expansion, places normalised', "):
        chosen_recipes(EXPERIMENTS["landmarks"], ["expansion, normalised"])


def test_strategies_are_those_of_active_learning():
    assert labelling.STRATEGIES == active.STRATEGIES

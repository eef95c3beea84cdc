"""What stands in the tables: the paper's numbers, heads and options, and what tells cells apart."""

import re
from dataclasses import replace

import pytest

from kernelhead.finetune.select import STRATEGIES
from kernelhead_lab.heads import create_lab_head, lab_option_defaults
from kernelhead_lab.networks import build, create_backbone
from kernelhead_lab.spec import NETWORKS, USUAL, LabSpec, Subset, head
from kernelhead_lab.tables import EXPERIMENTS, labelling
from kernelhead_lab.tables.experiment import Candidate, Protocol, adapted, paper_number, paper_numbers
from kernelhead_lab.tables.queue import chosen_cells

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
BEYOND = ("landmarks", "saturation", "beyond", "mixup", "epochs", "transfer-long")
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


def all_cells():
    """Every cell of every table, those that others build on with them."""
    found = []

    def add(cell):
        if cell is not None:
            found.append(cell)
            for other in (cell.builds_on, cell.chosen_as):
                add(other)

    for experiment in EXPERIMENTS.values():
        for cell in experiment.cells:
            add(cell)
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


def test_keys_tell_specs_apart_and_are_names_of_folders():
    by_key = {}
    for cell in all_cells():
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", cell.spec.key)  # what every file system takes, with room for more
        # What is trained differs exactly where the key does.
        assert by_key.setdefault((cell.spec.data, cell.spec.key), cell.spec) == cell.spec
    lower = [(data, key.lower()) for data, key in by_key]
    assert len(set(lower)) == len(lower)  # some file systems do not tell a from A
    # 2 CIFAR tables, transfer, distillation, 84 subsets and a control and the seed models, what the ablations add with
    # two depths,
    papers = 30 + 30 + 12 + 8 + 87 + 2 * (2 + 2 + 3)
    # what `landmarks` adds but the linear head, second-order pooling and the paper's layer, then `saturation` but two
    # of these, 512 landmarks or channels and 2048 of either with and without dropout, `beyond`: two more heads at six
    # depths of two data sets, four of them above, `mixup`, and seven heads in `transfer-long`.
    assert len(by_key) == papers + 2 * (39 - 3) + (32 - 8) + (2 * 12 - 4) + 30 + 14


PLAIN = LabSpec("cifar10", f"{NETWORKS}cifar_resnet8", **head("kernel"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({}, "resnet8-kernel"),
        ({"rectified": True}, "resnet8-rectified-kernel"),
        ({"backbone_options": {"kervolution": "first"}}, "resnet8-kervolution_first-kernel"),
        (head("kernel", kernel="rbf"), "resnet8-kernel-kernel_rbf"),
        (head("kernel", degree=10), "resnet8-kernel-degree_10"),
        (head("kernel", coefficients="softmax"), "resnet8-kernel-coefficients_softmax"),
        (head("cosine"), "resnet8-cosine"),
        (head("landmarks", landmarks=9, scale=1.0), "resnet8-landmarks-landmarks_9-scale_1.0"),
        ({"mixup": True}, "resnet8-kernel-mixup"),
        ({"subset": Subset("k-center", 30)}, "resnet8-kernel-kcenter30"),
        ({"teacher": PLAIN}, "resnet8-kernel-taught-by-resnet8-kernel"),
        ({"backbone": "torchvision/resnet50", "pretrained": True}, "resnet50-pretrained-kernel"),
        ({"backbone": "torchvision/resnet50", "weights": "w.safetensors"}, "resnet50-pretrained-kernel"),
    ],
)
def test_keys_say_what_is_trained(change, key):
    assert replace(PLAIN, **change).key == key


def test_a_spec_comes_back_from_its_recipe():
    taught = replace(PLAIN, teacher=replace(PLAIN, seed=3), subset=Subset("margin", 30), seed_model=PLAIN, epochs=2)
    recipe = taught.recipe()
    assert "device" not in recipe
    assert "device" not in recipe["teacher"]
    assert LabSpec.from_dict(recipe) == taught
    with pytest.raises(ValueError, match="unknown setting 'hed'; LabSpec has accumulate, amp, augment"):
        LabSpec.from_dict({**recipe, "hed": 1})


def test_every_cell_names_all_options_of_its_head_and_every_result_says_them():
    for cell in all_cells():
        assert cell.spec.head_options.keys() == lab_option_defaults(cell.spec.head).keys()
        assert None not in (cell.spec.pretrained, cell.spec.image_size)
        assert cell.spec.augment != "auto"
    for name, usual in USUAL.items():
        assert usual.items() <= {**lab_option_defaults(name), **usual}.items()


def test_ablations_share_runs_with_the_table_of_cifar100():
    linear, ours = (cell_of("cifar100", "ResNet-56", column).spec for column in ("SM", "Ours"))
    for table, row, column, whole in (
        ("kernels", "Learned kernel", "ResNet-56", ours),
        ("rectification", "unrectified features", "SM ResNet-56", linear),
        ("rectification", "unrectified features", "Ours ResNet-56", ours),
        ("activations", "relu", "ResNet-56", ours),
    ):
        assert cell_of(table, row, column).spec == whole
    for cell in EXPERIMENTS["distillation"].cells:
        table = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}[cell.row]
        assert cell.spec.teacher == cell.builds_on.spec == cell_of(table, "ResNet-56", "SM").spec
        assert cell.builds_on.chooser.spec == cell_of(table, "ResNet-56", "SM").chooser.spec
        assert cell.spec.backbone == f"{NETWORKS}lenet5"
    for cell in EXPERIMENTS["active"].cells:
        row = cell.column.split()[-1]
        whole = {head: cell_of("cifar100", row, head) for head in ("SM", "LIN", "Ours")}
        assert cell.chooser.spec == whole[cell.column.split()[0]].chooser.spec
        seed_model = cell.spec.seed_model
        assert cell.builds_on.spec == seed_model
        assert cell.builds_on.chooser.spec == whole["SM"].chooser.spec
        assert replace(seed_model, subset=None) == whole["SM"].spec
        assert seed_model.subset == Subset("random", 10)
        assert cell.spec.backbone == whole["SM"].spec.backbone


@pytest.mark.parametrize("name", TABLES)
def test_baselines(name):
    experiment = EXPERIMENTS[name]
    for cell in experiment.cells:
        baseline = experiment.baseline(cell)
        if cell.column.split()[0] == "SM":
            assert baseline is None
            assert cell.spec.head == "linear"
            continue
        table, other = baseline
        if name in ("kernels", "activations"):
            assert (table, other.spec) == ("cifar100", cell_of("cifar100", cell.column, "SM").spec)
        else:
            expected = re.sub(r"^\w+", "SM", cell.column)
            assert (table, other) == (name, cell_of(name, cell.row, expected))
        # The baseline differs in the head, for KER in the first convolution, and in nothing else.
        kervolution = {"kervolution": "first"} if cell.column == "KER" else {}
        assert other.spec == replace(cell.spec, **head("linear"), backbone_options={})
        assert cell.spec.backbone_options == kervolution


def test_heads_and_options_are_the_papers():
    for name in ("cifar10", "cifar100"):
        for row in (8, 56):
            heads = {c: cell_of(name, f"ResNet-{row}", c).spec.head for c in ("SM", "LIN", "SOP", "KER", "Ours")}
            assert list(heads.values()) == ["linear", "cosine", "second_order", "linear", "kernel"]
            assert cell_of(name, f"ResNet-{row}", "Ours").spec.backbone == f"{NETWORKS}cifar_resnet{row}"
    papers = {
        "degree": 7,
        "kernel": "learned",
        "coefficients": "relu",
        "temperature": None,
        "gamma": 1.0,
        "bias": False,
    }
    assert cell_of("cifar100", "ResNet-20", "Ours").spec.head_options == papers
    polynomial = cell_of("kernels", "Polynomial kernel", "ResNet-56").spec
    assert polynomial.head_options == {**papers, "kernel": "polynomial", "degree": 10}
    assert cell_of("kernels", "Gaussian RBF kernel", "ResNet-56").spec.head_options == {**papers, "kernel": "rbf"}
    for row in ("sigmoid", "softmax", "relu", "none"):
        assert cell_of("activations", row, "ResNet-56").spec.head_options == {**papers, "coefficients": row}
    ours = cell_of("activations", "relu", "ResNet-56").spec
    assert len(create_lab_head(ours.head, 64, 100, **ours.head_options).alpha) == 10
    assert create_lab_head("kernel", 64, 100, coefficients="sigmoid").temperature == 0.1
    assert create_lab_head("kernel", 64, 100, coefficients="softmax").temperature == 0.005


def test_every_cell_can_be_built():
    backbones, heads = {}, set()
    for cell in all_cells():
        spec = replace(cell.spec, pretrained=False)
        kind = spec.backbone, str(spec.backbone_options), spec.rectified
        backbone = backbones.setdefault(kind, None) or create_backbone(spec)
        backbones[kind] = backbone
        made = spec.head, str(spec.head_options), backbone.num_features
        if made not in heads and (spec.head, spec.backbone) != ("second_order", "torchvision/resnet50"):  # 800 million
            heads.add(made)
            create_lab_head(spec.head, backbone.num_features, 100, **spec.head_options)
    assert build(PLAIN, 10).head.num_classes == 10


def test_the_long_protocol_compares_rates_with_one_decay_and_decays_with_one_rate():
    long = EXPERIMENTS["transfer-long"]
    assert list(long.protocols) == ["tuned"]
    assert long.protocols["tuned"].rate_first
    for cell in long.cells:
        assert (cell.spec.augment, cell.spec.image_size, cell.spec.pretrained) == ("imagenet", 224, True)
        published = None if cell.column in ("EXP", "Best", "ATT") else typed("transfer")[cell.row, cell.column]
        number = paper_number("transfer-long", cell)
        assert (number if number is None else f"{number:.2f}") == published


def test_protocols():
    for name, experiment in EXPERIMENTS.items():
        if name == "transfer-long":
            continue
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
    assert several.applied(PLAIN, Candidate(0.5, 0.25, 10.0), 7, 3) == replace(
        PLAIN, learning_rate=0.5, weight_decay=0.25, head_rate=10.0, epochs=7, batch_size=8, warmup_epochs=5, seed=3
    )
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
    cells = chosen_cells(EXPERIMENTS[table], only)
    assert len({cell.spec.key for cell in cells}) == len(cells) == count


def test_an_unknown_row_is_refused():
    with pytest.raises(ValueError, match="cifar10 has no row or column 'ResNet-9'; it has KER, LIN, Ours, ResNet-14"):
        chosen_cells(EXPERIMENTS["cifar10"], ["SM", "ResNet-9"])


def test_names_that_no_cell_has_together_are_refused():
    with pytest.raises(ValueError, match="beyond has no cell that is all of 'SM CIFAR-100', 'CIFAR-10'"):
        chosen_cells(EXPERIMENTS["beyond"], ["SM CIFAR-100", "CIFAR-10"])
    with pytest.raises(ValueError, match="'expansion, positions normalised', "):
        chosen_cells(EXPERIMENTS["landmarks"], ["expansion, normalised"])


def test_strategies_are_those_of_active_learning():
    assert set(labelling.STRATEGIES) == set(STRATEGIES) - {"badge"}

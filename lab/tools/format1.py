"""Names and options of heads in result files of format 1, in today's words.

Format 1 leaves out options at their defaults of that time, which `OLD_DEFAULTS` has.

    format 1                                              today
    softmax                                               linear
    linear                                                cosine
    kernel                                                kernel
    kernel pool="rkhs"                                    pooled_kernel
    kernel prototypes=P                                   prototypes
    kernel prototypes=P pool="rkhs"                       pooled_prototypes
    kernel landmarks=Q                                    landmarks
    kernel landmarks=Q dropout|window|eps|standardize     landmarks_variant
    expansion normalized=True standardized=True           expansion
    expansion otherwise                                   expansion_variant
    second_order                                          second_order
    second_order dropout=p                                second_order_variant

kernel="linear" -> kernel="cosine", pool="rkhs" -> pool="auto", places=True -> pool="auto", places=False -> pool=None.
"""

from typing import Any

OLD_DEFAULTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {},
    "kernel": {
        "degree": 7,
        "kernel": "learned",
        "coefficients": "relu",
        "temperature": None,
        "prototypes": 1,
        "aggregate": "logsumexp",
        "landmarks": None,
        "pool": None,
        "window": 1,
        "standardize": True,
        "scale": 1.0,
        "eps": 1e-5,
        "dropout": 0.0,
        "gamma": 1.0,
    },
    "expansion": {
        "width": 512,
        "normalized": False,
        "standardized": False,
        "scale": 1.0,
        "places": True,
        "window": 1,
        "dropout": 0.0,
    },
    "second_order": {"places": True, "dropout": 0.0},
}


def renamed(head: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return today's name and all options of a head that a file of format 1 describes.

    Example:
        >>> renamed("second_order", {})
        ('second_order', {'pool': 'auto'})
    """
    if head not in OLD_DEFAULTS:
        raise ValueError(f"format 1 has no head {head!r}; it has {', '.join(OLD_DEFAULTS)}")
    unknown = [option for option in options if option not in OLD_DEFAULTS[head]]
    if unknown:
        raise ValueError(f"format 1 has no option {unknown[0]!r} of head {head!r}")
    old = {**OLD_DEFAULTS[head], **options}
    if head == "kernel":
        return _kernel(old, prototypes="prototypes" in options)
    if head == "expansion":
        return _expansion(old)
    if head == "second_order":
        own = {"pool": _pool_of(old["places"])}
        return ("second_order_variant", {**own, "dropout": old["dropout"]}) if old["dropout"] else (head, own)
    return {"softmax": "linear", "linear": "cosine"}[head], {}


def _kernel(old: dict[str, Any], *, prototypes: bool) -> tuple[str, dict[str, Any]]:
    own = {
        "degree": old["degree"],
        "kernel": "cosine" if old["kernel"] == "linear" else old["kernel"],
        "coefficients": old["coefficients"],
        "gamma": old["gamma"],
    }
    pool = "auto" if old["pool"] == "rkhs" else None
    if old["landmarks"] is None:
        own = {**own, "temperature": old["temperature"], "bias": False}
        if prototypes:
            own = {**own, "prototypes": old["prototypes"], "aggregate": old["aggregate"]}
        name = "prototypes" if prototypes else "kernel"
        return (name, own) if pool is None else (f"pooled_{name}", {**own, "pool": pool})
    if old["temperature"] is not None:
        raise ValueError(f"landmarks have no temperature; got {old['temperature']}")
    own = {**own, "landmarks": old["landmarks"], "pool": pool, "scale": old["scale"]}
    varied = {name: old[name] for name in ("window", "standardize", "eps", "dropout")}
    if all(varied[name] == OLD_DEFAULTS["kernel"][name] for name in varied):
        return "landmarks", own
    return "landmarks_variant", {**own, **varied}


def _expansion(old: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if old["window"] != 1:
        raise ValueError(f"the expansion has no windows any more; got window={old['window']}")
    own = {"width": old["width"], "pool": _pool_of(old["places"]), "scale": old["scale"]}
    varied = {name: old[name] for name in ("normalized", "standardized", "dropout")}
    if varied == {"normalized": True, "standardized": True, "dropout": 0.0}:
        return "expansion", own
    return "expansion_variant", {**own, **varied}


def _pool_of(places: bool) -> str | None:
    return "auto" if places else None

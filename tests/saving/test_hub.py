"""Models on the Hub: a server on this machine that speaks as much of its language as uploads and downloads need."""

import base64
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import kernelhead

SHA = "0123456789abcdef0123456789abcdef01234567"


def etag(content):
    return hashlib.sha1(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory, by name."""

    repositories: dict[str, dict[str, bytes]]
    private: dict[str, bool]

    def log_message(self, *_):
        pass

    def reply(self, code, body=b"", **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        _, api, kind, *rest = self.path.split("/")
        assert (api, self.headers["Authorization"]) == ("api", "Bearer a-token")
        if kind == "validate-yaml":  # of the card
            assert "library_name:" in json.loads(body)["content"]
            return self.reply(200, {"errors": [], "warnings": []})
        if kind == "repos":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories.setdefault(name, {})
            self.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private"))
            return self.reply(200, {"url": f"{self.server.address}/{name}", "name": name})
        name, action = "/".join(rest[:2]), rest[2]
        if action == "preupload":
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for each in json.loads(body)["files"]]  # fmt: skip
            return self.reply(200, {"files": files})
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.reply(200, {"success": True, "commitUrl": f"{self.server.address}/{name}/commit/{SHA}",
                                "commitOid": SHA, "hookOutput": ""})  # fmt: skip

    def do_GET(self):
        _, *parts = self.path.split("?")[0].split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.repositories:
            name = "/".join(parts[2:4])
            if parts[4:5] == ["tree"]:
                files = self.repositories[name].items()
                return self.reply(200, [{"type": "file", "path": path, "size": len(content), "oid": etag(content)}
                                        for path, content in files])  # fmt: skip
            files = [{"rfilename": each} for each in self.repositories[name]]
            return self.reply(200, {"id": name, "sha": SHA, "siblings": files, "private": False, "tags": []})
        files = self.repositories.get("/".join(parts[:2]), {})
        if parts[2:3] == ["resolve"] and parts[-1] in files:
            content = files[parts[-1]]
            return self.reply(200, content, ETag=f'"{etag(content)}"', X_Repo_Commit=SHA)
        missing = "EntryNotFound" if "/".join(parts[:2]) in self.repositories else "RepoNotFound"
        return self.reply(404, {"error": missing}, X_Error_Code=missing, X_Repo_Commit=SHA)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The repositories of a Hub on this machine, which huggingface_hub takes for the usual one."""
    from huggingface_hub import constants

    own = type("Own", (Hub,), {"repositories": {}, "private": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + path[path.index("/{repo_id}") :])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "a-token")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield own
    server.shutdown()
    thread.join()
    server.server_close()


def trained_head():
    head = kernelhead.LandmarkHead(6, 4, landmarks=5)
    head(torch.randn(9, 6))
    return head.eval()


def test_a_model_goes_to_the_hub_and_comes_back(hub):
    head, x = trained_head(), torch.randn(7, 6)
    address = kernelhead.push_to_hub(head, "somebody/birds", private=True, data="Birds.", figures={"accuracy": 91.5})
    assert address.endswith("/somebody/birds")
    assert hub.private == {"somebody/birds": True}
    files = hub.repositories["somebody/birds"]
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert files["README.md"].startswith(b"---\nlibrary_name: kernelhead\n")
    assert b"- accuracy: 91.5\n" in files["README.md"]
    files["picture.png"] = b"which nobody needs"
    loaded = kernelhead.load("somebody/birds")
    assert torch.equal(loaded(x), head(x))
    assert loaded.config == head.config


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ours", "its own"])
def test_networks_of_transformers(hub, how, monkeypatch):
    import transformers

    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made once, for one address
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=40, **sizes)
    model = kernelhead.kernelize(transformers.BertForSequenceClassification(config), 3, landmarks=6).eval()
    if how == "ours":
        kernelhead.push_to_hub(model, "somebody/texts")
    else:
        model.push_to_hub("somebody/texts")
    ids = torch.randint(40, (4, 7))
    with torch.no_grad():
        assert torch.equal(kernelhead.load("somebody/texts")(input_ids=ids).logits, model(input_ids=ids).logits)
    with pytest.raises(OSError, match="somebody/texts does not appear to have a file named"):
        transformers.AutoModelForSequenceClassification.from_pretrained("somebody/texts")


def test_a_repository_is_written_again_and_read_at_a_revision(hub):
    for _ in range(2):
        head = trained_head()
        kernelhead.push_to_hub(head, "somebody/birds")
    x = torch.randn(7, 6)
    assert torch.equal(kernelhead.load("somebody/birds", revision=SHA)(x), head(x))


def test_a_local_folder_comes_first(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local, x = trained_head(), torch.randn(7, 6)
    kernelhead.push_to_hub(trained_head(), "somebody/birds")
    kernelhead.save(local, "somebody/birds")
    assert torch.equal(kernelhead.load("somebody/birds")(x), local(x))


def test_what_is_not_there_is_said_in_one_sentence(hub):
    with pytest.raises(FileNotFoundError, match=r"^there is no folder nobody/nothing, and the Hub gives no") as error:
        kernelhead.load("nobody/nothing")
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"^there is no folder a/b/c$"):
        kernelhead.load("a/b/c")
    hub.repositories["somebody/else"] = {"pytorch_model.bin": b"a pickle", "README.md": b""}
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        kernelhead.load("somebody/else")


def test_a_run_of_the_command_line_is_not_read_from_the_hub(hub):
    """Its settings name a function of somebody's own to be called."""
    hub.repositories["somebody/else"] = {"model.safetensors": b"", "config.yaml": b""}
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        kernelhead.load("somebody/else")


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kernelhead\[hub\]'"):
        kernelhead.load("somebody/birds")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kernelhead\[hub\]'"):
        kernelhead.push_to_hub(trained_head(), "somebody/birds")

"""What looks like a secret is refused wherever a recipe may hold it, and never repeated; what is ordinary is not."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from llmlaunch.assets import asset
from llmlaunch.causes.redaction import masked
from llmlaunch.cluster.load import load_cluster
from llmlaunch.documents.secrets import (
    is_secret_file,
    is_secret_variable,
    known_secret,
    looks_secret,
    refuse_secrets,
    secret_in,
)
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.sections import Event
from llmlaunch.rundir.notices import EVENTS
from support.recipes import SMALL
from support.soak import examples

ROOT = Path(__file__).resolve().parents[3]
GOOD = SMALL.read_text()
HIDDEN = "Zq7xW2vK9pLm4Rt8"  # in every secret below, so that a message that repeats one is seen
HF = f"hf_{HIDDEN}AbCdEfGhIjKlMnOpQr"

SECRETS = {
    "a name": f"environment: {{MY_SERVICE_TOKEN: {HIDDEN}}}",
    "a name by itself": f"environment: {{TOKEN: {HIDDEN}}}",
    "a personal access token": f"environment: {{GITHUB_PAT: {HIDDEN}}}",
    "a key": f"environment: {{WANDB_KEY: {HIDDEN}}}",
    "what a token may do": f"environment: {{HF_HUB_TOKEN_RW: {HIDDEN}}}",
    "a known value under a plain name": f"environment: {{HUB: {HF}}}",
    "an AWS key": "environment: {WHO: AKIAZQ7XW2VK9PLM4RT8}",
    "a proxy": f"environment: {{http_proxy: 'http://user:{HIDDEN}@proxy:3128'}}",
    "a proxy without its scheme": f"environment: {{https_proxy: 'user:{HIDDEN}@proxy:3128'}}",
    "login by option": f"setup: [huggingface-cli login --token {HIDDEN}]",
    "the newer login": f"setup: [hf auth login --token={HIDDEN}]",
    "login by argument": f"setup: [wandb login --relogin {HIDDEN}]",
    "login by pipe": f"setup: ['echo {HIDDEN} | docker login --password-stdin']",
    "adding to a variable": f"setup: [HF_TOKEN+={HIDDEN}]",
    "reading": f"setup: ['read -r HF_TOKEN <<< {HIDDEN}']",
    "printing into a variable": f"setup: ['printf -v HF_TOKEN {HIDDEN}']",
    "a default": f"setup: ['export HF_TOKEN=${{HF_TOKEN:-{HIDDEN}}}']",
    "an export of a plain name": f"setup: [export HUB={HF}]",
    "a header": f"setup: ['curl -H \"Authorization: Bearer {HIDDEN}\" https://h']",
    "a clone": f"setup: ['git clone https://oauth2:{HIDDEN}@host/x.git']",
    "a slurm option": f"slurm: {{export: 'ALL,WANDB_KEY={HIDDEN}'}}",
    "a slurm comment": f"slurm: {{comment: '{HF}'}}",
    "an image": f"container: {{image: 'docker://me:{HIDDEN}@registry/image'}}",
    "a mount": f"container: {{image: x.sqsh, mounts: ['/data/{HF}:/data']}}",
    "data": f"data: {{path: 's3://KEY:{HIDDEN}@bucket/data'}}",
    "a signed address": f"data: {{path: 'https://host/data?X-Amz-Signature={HIDDEN}'}}",
    "arguments": f"backend: {{name: megatron-lm, extra_args: ['--wandb-api-key={HIDDEN}']}}",
    "two arguments": f"backend: {{name: megatron-lm, extra_args: [--wandb-key, {HIDDEN}]}}",
    "a cluster inside": f"cluster: {{base: h100-80gb-x8, environment: {{WANDB_API_KEY: {HIDDEN}}}}}",
    "a comment": f"# {HF}",
    "a comment with an assignment": f"nodes: 4  # export WANDB_KEY={HIDDEN}",
    "a key that is commented out": f"#  WANDB_API_KEY: {HIDDEN}",
    "a key file": f"environment: {{X: '-----BEGIN OPENSSH PRIVATE KEY-----{HIDDEN}'}}",
    "a cookie": f"environment: {{SESSION_COOKIE: {HIDDEN}}}",
    "a database": f"environment: {{SENTRY_DSN: 'https://{HIDDEN}@sentry.example/1'}}",
    "a login of curl": f"setup: ['curl -u me:{HIDDEN} https://h']",
    "netrc": f"setup: [\"printf 'machine h login me password {HIDDEN}' >~/.netrc\"]",
    "JSON text": 'environment: {SETTINGS: \'{"token": "' + HIDDEN + "\"}'}",
    "a command for notices": f"notify: {{command: [curl, -u, 'me:{HIDDEN}', 'https://h']}}",
    "a key of a mapping": f"environment: {{{HF}: 1}}",
}


def with_line(line: str) -> str:
    """GOOD with this line in the place of the one with its key."""
    key = line.partition(":")[0]
    lines = [each for each in GOOD.splitlines() if line.startswith("#") or not each.startswith(f"{key}:")]
    if key == "slurm":
        lines = [each for each in lines if not each.startswith("  time:")]
    return "\n".join([*lines, line]) + "\n"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{webhook: log}", "notify: webhook is log; write the variable in capitals"),
        ("{events: [end]}", "notify: names neither a webhook nor a command"),
        ("{webhook: URL, events: []}", "notify.events: has 0 items"),
        ("{webhook: URL, events: [done]}", "notify.events[0]: must be one of start, first_step, stall"),
    ],
)
def test_notices_that_would_tell_nothing_are_refused(written: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(with_line(f"notify: {written}"))
    with pytest.raises(UserError, match=re.escape(problem)):
        load_recipe(path)


def test_the_events_of_a_recipe_are_those_of_the_nodes() -> None:
    assert get_args(Event) == EVENTS


@pytest.mark.parametrize(
    "address", [f"https://ntfy.example/{HIDDEN}", f"https://hooks.slack.com/services/{HIDDEN}/x/y"]
)
@pytest.mark.parametrize("by_override", [False, True])
def test_the_address_of_a_webhook_is_refused_with_what_to_write_instead(
    address: str, by_override: bool, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        GOOD if by_override else with_line(f"notify: {{webhook: '{address}'}}\nnot_secrets: [notify.webhook]")
    )
    with pytest.raises(UserError) as refusal:
        load_recipe(path, [f"notify.webhook={address}"] if by_override else [])
    message = str(refusal.value)
    assert "notify.webhook: must be the name of a variable" in message
    assert message.endswith("write export NOTIFY_URL=ADDRESS, and here notify: {webhook: NOTIFY_URL}")
    assert "not_secrets" not in message
    if not by_override:
        assert HIDDEN not in message


@pytest.mark.parametrize("what", SECRETS)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(what: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(with_line(SECRETS[what]))
    with pytest.raises(UserError) as refusal:
        load_recipe(path)
    message = str(refusal.value)
    assert refusal.value.exit_code == 2
    assert HIDDEN not in message
    assert HIDDEN.upper() not in message
    assert f"recipe.yaml:{len(path.read_text().splitlines())}: " in message
    assert "not_secrets: [" in message
    assert what.startswith(("a comment", "a key that")) or "list the name under secrets:" in message


@pytest.mark.parametrize(
    "word",
    [
        f"environment.WANDB_KEY={HIDDEN}",
        f"environment.HUB={HF}",
        f"backend={{name: megatron-lm, extra_args: [--wandb-key, {HIDDEN}]}}",
        f"setup=[wandb login {HIDDEN}]",
        f"slurm.export=ALL,GITHUB_PAT={HIDDEN}",
        f"nodes=4 # {HF}",
        f"data.path=s3://k:{HIDDEN}@bucket",
    ],
)
def test_a_secret_in_a_word_of_the_command_line_is_refused_also_where_a_later_word_replaces_it(
    word: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    for overrides in ([word], [word, f"{word.partition('=')[0]}=null"]):
        with pytest.raises(UserError, match="not_secrets") as refusal:
            load_recipe(path, overrides)
        assert HIDDEN not in str(refusal.value)


def test_a_false_alarm_is_overruled_by_name_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{GOOD}environment: {{BUILD_KEY: release}}\nnot_secrets: [environment.BUILD_KEY, comments] # {HF}\n"
    )
    recipe = load_recipe(path)
    assert recipe.environment == {"BUILD_KEY": "release"}
    assert recipe.not_secrets == ("environment.BUILD_KEY", "comments")
    note = "no secret stands in environment.BUILD_KEY, comments, though it looks so (not_secrets)"
    assert note in recipe.assumptions
    with pytest.raises(UserError, match=r"environment\.OTHER_KEY: looks like a secret"):
        load_recipe(path, ["environment.OTHER_KEY=release"])
    plain = tmp_path / "plain.yaml"
    plain.write_text(GOOD)
    assert load_recipe(plain, ["not_secrets=[environment.BUILD_KEY]"]).assumptions == load_recipe(plain).assumptions


def test_a_profile_holds_no_secret_either(tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text(f"base: h100-80gb-x8\nenvironment: {{https_proxy: 'http://me:{HIDDEN}@proxy:1'}}\n")
    with pytest.raises(UserError, match=r"site\.yaml:2: environment\.https_proxy: holds a password") as refusal:
        load_cluster(str(profile))
    assert HIDDEN not in str(refusal.value)
    profile.write_text("base: h100-80gb-x8\nenvironment: {BUILD_KEY: x}\nnot_secrets: [environment.BUILD_KEY]\n")
    assert load_cluster(str(profile)).environment == {"BUILD_KEY": "x"}


@pytest.mark.parametrize(
    "ordinary",
    [
        "data/tokenizer.json",
        "TOKENIZERS_PARALLELISM=false",
        "--tokenizer-type HuggingFaceTokenizer",
        "max_tokens=4096",
        "--eos-token </s> --pad-token=<pad> --json-keys text --sort_key length",
        "--moe-token-dispatcher-type alltoall --moe-token-drop-policy probs",
        "HF_TOKEN_PATH=/home/me/.token",
        "SSL_KEY=/etc/ssl/private/site",
        "GOOGLE_APPLICATION_CREDENTIALS=/home/me/gcp.json",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
        "docker://org/image:25.08@sha256:" + "1" * 64,
        "nvcr.io#nvidia/pytorch:25.08-py3",
        "git checkout 0a5b3431f2c9d8e7b6a5948372615049382716af",
        "ssh://git@github.com/org/x.git",
        "http://proxy.site.org:3128/path@x",
        "export HF_TOKEN=$(cat ~/.token)",
        'export HF_TOKEN="${HF_TOKEN:?not set}"',
        "read -r HF_TOKEN < /run/token",
        'wandb login --relogin --host https://wandb.site.org "$WANDB_API_KEY"',
        "huggingface-cli login --token $HF_TOKEN",
        "set HF_TOKEN where you submit; the password: see the wiki",
        "NCCL_IB_HCA=mlx5_0:1,mlx5_1:1 rank:0@node1:29500",
        "/scratch/models/hf_llama370b/risk-management-of-very-long-names",
    ],
)
def test_what_is_ordinary_is_no_secret(ordinary: str) -> None:
    assert secret_in(ordinary) is None


@pytest.mark.parametrize(
    "line",
    [
        f"curl -u me:{HIDDEN} https://h/x",
        f"curl -ume:{HIDDEN} h",
        f"curl -sSfu 'me:{HIDDEN}' h",
        f"sshpass -p{HIDDEN} ssh h",
        f"sshpass -p '{HIDDEN}' rsync",
        f"mysql -p{HIDDEN} db",
        f"mysql -uroot -p'{HIDDEN}'",
        f"printf 'machine h login me password {HIDDEN}\\n' > ~/.netrc",
        f"printf 'machine h\\nlogin me\\npassword {HIDDEN}\\n' >> ~/.netrc",
        f"printf 'machine %s login %s password %s' api.wandb.ai user {HIDDEN} >~/.netrc",
        f"echo 'machine api.wandb.ai login user password {HIDDEN}' >> ~/.netrc",
        f"cat > ~/.netrc <<EOF\nmachine h login me password {HIDDEN}\nEOF",
        f"openssl enc -d -pass pass:{HIDDEN} -in x",
        f"mc alias set s3 https://h AKEY {HIDDEN}",
        f"aws configure set aws_secret_access_key {HIDDEN}",
        f"aws --profile p configure set default.aws_secret_access_key {HIDDEN}",
        f'{{"token": "{HIDDEN}"}}',
        f'echo "{{\\"api_key\\": \\"{HIDDEN}\\"}}" > f',
        f'echo \'{{"auths": {{"h": {{"auth": "{HIDDEN}"}}}}}}\' > ~/.docker/config.json',
        f"curl -b 'session={HIDDEN}' h",
        f"curl -H 'Cookie: sid={HIDDEN}' h",
        f"curl -H 'X-API-Key: {HIDDEN}'",
        f"kinit <<< {HIDDEN}",
        f"echo {HIDDEN} | sudo -S true",
        f"rclone config create s3 s3 secret_access_key {HIDDEN}",
        f"redis-cli -a {HIDDEN}",
        f"smbclient //h/s -U me%{HIDDEN}",
        f"lftp -u me,{HIDDEN} h",
        f"http -a me:{HIDDEN} h",
        f"ldapsearch -x -w {HIDDEN}",
        f"unzip -P {HIDDEN} x.zip",
        f"7z x -p{HIDDEN} x.7z",
        f"mongo -u me -p {HIDDEN}",
        f"kaggle config set -n key -v {HIDDEN}",
        f"echo {HIDDEN} > ~/.vault-token",
        f"printf {HIDDEN} > /root/.cache/huggingface/token",
        f"echo '{HIDDEN}' | gpg --passphrase-fd 0 -d x",
        f"echo 'h:5432:db:me:{HIDDEN}' > ~/.pgpass",
        f"Server=h;Uid=me;Pwd={HIDDEN};",
        f"htpasswd -b f me {HIDDEN}",
        f'curl -u "me":{HIDDEN} h',
        f'curl -u "$USER:{HIDDEN}" h',
        f"curl -fsSL \\\n  -u me:{HIDDEN} h",
        f"curl --proxy-header 'X-Token: {HIDDEN}' h",
        f"sshpass -vp {HIDDEN} ssh h",
        f"sshpass -p $'{HIDDEN}' ssh h",
        f"printf 'machine %s\\nlogin %s\\npassword %s\\n' h me {HIDDEN} > ~/.netrc",
        f'echo -e "machine h\\n\\tlogin me\\n\\tpassword {HIDDEN}" >> ~/.netrc',
        f'echo "password {HIDDEN}" >> ~/.netrc',
        f"openssl enc -aes-256-cbc -k {HIDDEN} -in x",
        f"mc alias set s3 https://h --api S3v4 AKEY {HIDDEN}",
        f"aws configure set --profile x aws_secret_access_key {HIDDEN}",
        f"printf '[default]\\naws_secret_access_key = {HIDDEN}\\n' > ~/.aws/credentials",
        f'echo \'{{"username":"me","key":"{HIDDEN}"}}\' > ~/.kaggle/kaggle.json',
        f"jq -n '{{token:\"{HIDDEN}\"}}'",
        f'echo "token: {HIDDEN}" > x.yaml',
        f"vault login {HIDDEN}",
        f"wandb login {HIDDEN}",
        f"echo {HIDDEN} | hf auth login",
        f"python -c \"login('{HIDDEN}')\"",
        f"cat > ~/.cache/huggingface/token <<< {HIDDEN}",
        f"export SLURM_JWT={HIDDEN}",
        f"HF_TOKEN=$'{HIDDEN}'",
    ],
)
def test_a_secret_that_a_line_gives_to_a_program_is_known_and_goes_from_what_is_kept(line: str) -> None:
    assert secret_in(line) is not None
    assert HIDDEN not in masked(line)


@pytest.mark.parametrize(
    "line",
    [
        "curl -u me:$PASS h",
        "curl -u me: h",
        'curl -u "${CREDS}" h',
        "curl -fsSL https://host:8080/x -o out",
        "curl -o u:x https://h",
        "curl -b cookies.txt h",
        'curl -H "Content-Type: application/json" h',
        'curl -H "X-API-Key: $KEY" h',
        "sshpass -e ssh h",
        'sshpass -p "$PW" ssh h',
        "mysql -p db",
        'mysql -p"$PW" db',
        'printf "machine %s login %s password %s\\n" api.wandb.ai user "$KEY" > ~/.netrc',
        'echo "machine h login me password $PW" > ~/.netrc',
        "openssl enc -pass env:PW",
        'openssl enc -pass "pass:$PW"',
        'mc alias set s3 https://h "$AK" "$SK"',
        "aws configure set region eu-west-1",
        'aws configure set aws_secret_access_key "$S"',
        "aws configure set default.s3.max_concurrent_requests 20",
        '{"eos_token": "</s>", "pad_token": "<pad>", "max_tokens": "4096"}',
        '{"sort_key": "length"}',
        '{"token": "$HF_TOKEN"}',
        '{"image_key": "img", "json_keys": "text"}',
        'echo "$PW" | sudo -S true',
        "docker run -u 1000:1000 img",
        "srun -u python train.py",
        "redis-cli -h h -p 6379",
        "rclone config create s3 s3 env_auth true",
        'echo "token file is at ~/.token"',
        'printf "%s" "$HF_TOKEN" > ~/.cache/huggingface/token',
        "mongo --port 27017",
        "ssh -p 22 me@host",
        "docker run -p 8080:80 x",
        "echo hello > ~/.netrc.bak",
        "lftp -u me h",
        "default login shell password prompts",
        'echo "PRIVATE: x" ',
        'echo \'{"type": "json", "key": "value"}\' > x.json',
        "jq -r '.token' f",
        "salloc -p debug",
        'ray start --head --redis-password="$P"',
        'sshpass -p \\\n "$PW" ssh h',
        'mc alias set s3 https://h --api S3v4 "$AK" "$SK"',
        'curl -u "${CREDS:-}" h',
        'curl -u "$(cat user):$(cat password)" h',
        'openssl enc -k "$K" -in x',
        'echo "password $PW" >> ~/.netrc',
        'echo "token: $HF_TOKEN" > x.yaml',
        'echo "tokens: 4096000000, sort_key: length12345"',
        "python -c \"login(token=os.environ['HF_TOKEN'])\"",
        "vault login -method=userpass username=me",
        "srun --login x -p debug",
        "python train.py --login-timeout 100 -p 3",
        "echo starting12345678 | tee login.log",
        "docker run -v /run/secret:/run/secret1234 x",
        "HF_TOKEN='' python x",
    ],
)
def test_a_line_that_passes_a_secret_by_reference_or_none_is_ordinary(line: str) -> None:
    assert secret_in(line) is None


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("SESSION_COOKIE", "abcdef123", True),
        ("SENTRY_DSN", "https://k@sentry.io/1", True),
        ("DATABASE_DSN", "host=h user=u password=x", True),
        ("DB_CONNECTION_STRING", "Server=h;Uid=u;Pwd=x", True),
        ("POSTGRES_DSN", "postgresql://h/db", False),
        ("HTTP_COOKIE_FILE", "/x/cookies", False),
    ],
)
def test_a_cookie_and_the_login_of_a_database_are_secrets(name: str, value: str, secret: bool) -> None:
    assert is_secret_variable(name, value) is secret


def test_no_recipe_profile_or_document_of_ours_looks_like_one() -> None:
    files = [*asset("recipes").rglob("*.yaml"), *asset("slurm").rglob("*.yaml"), *ROOT.glob("tests/**/*.yaml")]
    assert len(files) > 30
    for path in files:
        refuse_secrets(parse_document(path.read_text(), path.name), None)


PREFIXES = {
    "hf_": 30,
    "sk-ant-api03-": 40,
    "sk-proj-": 40,
    "ghp_": 36,
    "github_pat_": 60,
    "glpat-": 20,
    "xoxb-": 30,
    "AIza": 35,
    "nvapi-": 40,
    "npm_": 36,
    "pypi-AgEI": 60,
    "dckr_pat_": 27,
    "sk_live_": 24,
}
ALPHABET = string.ascii_letters + string.digits


@examples(60, 2000)
@given(
    prefix=st.sampled_from(sorted(PREFIXES)),
    rest=st.text(ALPHABET, min_size=60, max_size=60),
    around=st.sampled_from(["{}", "x={}", "/data/{}/y", "'{}'", "a {} b", "--x={}", "[{}]", "https://h/{}"]),
)
def test_a_services_own_prefix_is_known_wherever_it_stands(prefix: str, rest: str, around: str) -> None:
    secret = prefix + rest[: PREFIXES[prefix]]
    assert known_secret(around.format(secret)) is not None
    assert secret not in masked(around.format(secret))  # logs hide what recipes may not hold


WORDS = st.sampled_from(["my", "hf", "hub", "wandb", "aws", "site", "ml", "cluster", "s3", "registry"])
LAST = st.sampled_from(
    [
        "token",
        "api_key",
        "secret",
        "password",
        "access_key_id",
        "pat",
        "key",
        "passphrase",
        "credentials",
        "secret_access_key",
    ]
)
KINDS = st.sampled_from(["", "_rw", "_prod", "_2", "_v2"])
VALUES = st.text(ALPHABET, min_size=8, max_size=40).filter(lambda text: not text.isdigit())


@examples(60, 2000)
@given(first=WORDS, last=LAST, kind=KINDS, value=VALUES, upper=st.booleans())
@example(first="aws", last="secret_access_key", kind="", value="abcdefgh1", upper=True)
@example(first="my", last="password", kind="", value="abcdefgh1", upper=False)
def test_a_name_that_ends_like_a_secrets_is_known_in_every_form(
    first: str, last: str, kind: str, value: str, upper: bool
) -> None:
    name = f"{first}_{last}{kind}"
    name = name.upper() if upper else name
    assert looks_secret(name)
    flag = name.lower().replace("_", "-")
    for text in (f"export {name}={value}", f"{name}+='{value}'", f"--{flag} {value}", f"--{flag}={value} -x"):
        assert secret_in(text) is not None, text
    document = yaml.safe_dump({"environment": {name: value}})
    with pytest.raises(UserError):
        refuse_secrets(parse_document(document, "x"), None)
    for text in (f"export {name}=${first}", f'{name}="$({first})"', f"unset {name}", f"--{flag}-file /x/{first}"):
        assert secret_in(text) is None, text


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.local",
        "sub/.env",
        "prod.env",
        "server.pem",
        "a/b.key",
        "id_rsa",
        "id_ed25519.bak",
        ".netrc",
        "credentials.json",
        "credentials",
        "kubeconfig",
        ".npmrc",
        ".pypirc",
        ".huggingface/token",
        ".aws/config",
        ".kube/config",
        "secrets.yaml",
        "service_account_x.json",
    ],
)
def test_files_that_hold_secrets_are_known_by_name(name: str) -> None:
    assert is_secret_file(name)


@pytest.mark.parametrize(
    "name",
    [
        "train.py",
        "tokenizer.json",
        "environment.py",
        "env.yaml",
        "id_rsa.pub",
        "keys.py",
        "secrets.py",
        "credentials.py",
        "token.py",
        "monkey.txt",
        "megatron/core/tokenizers/text.py",
        "tests/token_ids.json",
        "requirements.txt",
    ],
)
def test_files_of_code_are_not(name: str) -> None:
    assert not is_secret_file(name)

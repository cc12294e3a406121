"""``HarborEnv``: task folders are read, built, played and graded; the model cannot
forge a verdict."""

import os

import pytest

import verifiers as vf
from support.agents import WRITER
from support.harbor_tasks import IMAGE, TEST, write_task
from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient
from verifiers_agents.turns import AgentRun

HOST = {IMAGE: "host"}


def bash(*commands):
    return [
        vf.ToolCall(f"c{n}", "bash", {"command": command}) for n, command in enumerate(commands)
    ]


def play(folder, *commands, **parameters):
    parameters = {"images": HOST, "sandbox": needs_sandbox()} | parameters
    env = vf.HarborEnv(folder, **parameters)
    return env.evaluate(ScriptedClient([*bash(*commands), "done"]), "m", state_columns=["verdict"])


def reward(results):
    assert results["errors"] == [None], results["errors"]
    return results["rewards"][0]


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path / "one")


# --- playing --------------------------------------------------------------------------------------


def test_the_model_works_in_the_work_folder_of_the_image_and_the_tests_grade_it(task):
    results = play(task, "pwd; cat start.txt", "echo right > out.txt")
    assert reward(results) == 1.0
    assert results["completions"][0][1]["content"] == "/app\nstart"
    assert reward(play(task, "echo wrong > out.txt")) == 0.0


def test_the_oracle_earns_one_and_nop_zero_without_a_model(task):
    def refuse(request):
        raise AssertionError("a model was called")

    for agent, expected in (("oracle", 1.0), ("nop", 0.0)):
        env = vf.HarborEnv(task, images=HOST, agent=agent, sandbox=needs_sandbox())
        results = env.evaluate(ScriptedClient(refuse), "m")
        assert (reward(results), results["stop_conditions"]) == (expected, ["agent_ended"])


def test_a_folder_of_tasks_is_loaded_by_its_path(task, monkeypatch):
    monkeypatch.chdir(task.parent)
    for path in (f"./{task.name}", str(task), "."):
        env = vf.load_environment(path, images={IMAGE: "host"}, agent="oracle")
        assert [row["info"]["harbor_task"] for row in env.get_eval_dataset()] == [task.name]
        assert env.env_id == (task.parent.name if path == "." else task.name)
    with pytest.raises(vf.UnknownEnvironment):
        vf.load_environment("no-such-environment", images={})  # an id is no path
    with pytest.raises(vf.UnknownEnvironment, match=rf"folder of Harbor tasks is \./{task.name}$"):
        vf.load_environment(task.name)


def test_a_row_is_a_task_and_changes_with_any_of_its_files(tmp_path):
    for name in ("b", "a"):
        write_task(tmp_path / name)
    rows = vf.HarborEnv(tmp_path, images=HOST).get_dataset()
    assert rows["task"][:] == ["a", "b"]
    assert rows["prompt"][0][-1]["content"] == "Write right to /app/out.txt."
    (tmp_path / "a" / "tests" / "test.sh").write_text("#!/bin/sh\n")
    changed = vf.HarborEnv(tmp_path, images=HOST).get_dataset()
    assert rows["info"][0]["digest"] != changed["info"][0]["digest"]
    assert rows["info"][1]["digest"] == changed["info"][1]["digest"]


def test_the_limits_of_a_task_hold(tmp_path):
    slow = write_task(tmp_path / "slow", "[agent]\ntimeout_sec = 1.0\n")
    results = play(slow, "sleep 20", "echo right > /app/out.txt")
    assert (reward(results), results["stop_conditions"]) == (0.0, ["agent_time_over"])
    short = write_task(tmp_path / "short", "[metadata]\nmax_turns = 1\n")
    results = play(short, "echo right > /app/out.txt", "echo wrong > /app/out.txt")
    assert (reward(results), results["stop_conditions"]) == (0.0, ["task_turns_reached"])
    small = write_task(tmp_path / "small", "[environment]\nmemory_mb = 64\nstorage_mb = 8\n")
    assert (
        "No space left"
        in play(small, "head -c 20M /dev/zero > big")["completions"][0][1]["content"]
    )


def test_variables_reach_the_agent_the_tests_and_the_solution(tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "right")
    toml = (
        '[environment.env]\nFROM_HOST = "${GIVEN}"\nDEFAULT ='
        ' "${UNSET_HERE:-x}"\n[verifier.env]\nWANTED = "right"\n'
    )
    test = (
        '#!/bin/sh\n[ "$(cat /app/out.txt)" = "$WANTED" ]; echo $((! $?)) >'
        " /logs/verifier/reward.txt\n"
    )
    dockerfile = f"FROM {IMAGE}\nENV A=1 B='two words'\nENV C ${{B}}!\nWORKDIR /app\n"
    task = write_task(tmp_path / "env", toml, test=test, dockerfile=dockerfile)
    results = play(
        task,
        'echo "$FROM_HOST" > out.txt; echo "$DEFAULT,$A,$B,$C,$WANTED"',
        host_variables=["GIVEN"],
    )
    assert (reward(results), results["completions"][0][1]["content"]) == (
        1.0,
        "x,1,two words,two words!,",
    )
    solved = write_task(
        tmp_path / "solved",
        '[solution.env]\nANSWER = "right"\n',
        solution='#!/bin/sh\necho "$ANSWER" > /app/out.txt\n',
    )
    assert reward(play(solved, agent="oracle")) == 1.0
    with pytest.raises(vf.ConfigError, match="needs the variable NOT_SET_HERE"):
        play(
            write_task(tmp_path / "unset", '[environment.env]\nX = "${NOT_SET_HERE}"\n'),
            host_variables=["NOT_SET_HERE"],
        )


@pytest.mark.parametrize("table", ["environment.env", "verifier.env", "solution.env"])
def test_a_task_takes_no_variable_of_this_machine_that_the_user_did_not_name(
    tmp_path, monkeypatch, table
):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-of-this-machine")
    asks = write_task(tmp_path / "asks", f'[{table}]\nX = "a ${{OPENAI_API_KEY}}"\n')
    with pytest.raises(vf.ConfigError, match=f"asks: {table} asks for the variable OPENAI_API_KEY"):
        vf.HarborEnv(asks, images=HOST)
    defaults = write_task(tmp_path / "defaults", f'[{table}]\nX = "${{OPENAI_API_KEY:-none}}"\n')
    (task,) = vf.HarborEnv(defaults, images=HOST).tasks()
    assert "canary" not in str(task)
    # negative control: what the user names is given
    (task,) = vf.HarborEnv(defaults, images=HOST, host_variables=["OPENAI_API_KEY"]).tasks()
    assert "canary-of-this-machine" in str(task)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
@pytest.mark.parametrize("content", [None, "a = " + "[" * 50_000, b"\xff"])
def test_a_task_whose_files_cannot_be_read_is_refused_by_its_name(tmp_path, name, content):
    task = write_task(tmp_path / "bad", "")
    (task / name).unlink()
    if content is None:
        os.mkfifo(task / name)
    elif isinstance(content, bytes):
        (task / name).write_bytes(content)
    elif name == "task.toml":
        (task / name).write_text(content)
    else:
        (task / name).symlink_to("/dev/zero")
    with pytest.raises(vf.ConfigError, match="bad"):
        vf.HarborEnv(tmp_path, images=HOST)


# --- building -------------------------------------------------------------------------------------


def test_a_dockerfile_is_built_once_and_every_sandbox_has_its_files(tmp_path):
    dockerfile = (
        f"# a comment\nFROM {IMAGE} AS base\nENV WHO=me\nWORKDIR /app\nCOPY . /data/\nRUN mkdir -p"
        " deep/er && \\\n    # inside\n    echo $WHO > deep/er/who && date +%s%N > stamp\nWORKDIR"
        ' deep\nRUN ["sh", "-c", "pwd > /app/where; chmod 600 /app/where; ln -s /usr/bin/env'
        ' /app/link"]\nCMD ["sleep"]\n'
    )
    task = write_task(tmp_path / "built", 'artifacts = ["/app"]', dockerfile=dockerfile)
    env = vf.HarborEnv(task, images=HOST, sandbox=needs_sandbox())
    command = (
        "pwd; cd /app; cat deep/er/who stamp where /data/start.txt; stat -c %a where; readlink link"
    )
    client = ScriptedClient(lambda request: bash(command) if len(request.prompt) == 2 else "done")
    results = env.evaluate(client, "m", rollouts_per_example=2)
    first, second = [completion[1]["content"].split("\n") for completion in results["completions"]]
    assert first == second, "the stamp is of one build"
    assert first[:2] == ["/app/deep", "me"]
    assert first[3:] == ["/app/deep", "start", "600", "/usr/bin/env"]


def test_a_command_that_fails_is_said_before_the_first_model_call(tmp_path):
    dockerfile = f"FROM {IMAGE}\nWORKDIR /app\nRUN apt-get install -y cowsay\n"
    task = write_task(tmp_path / "built", dockerfile=dockerfile)
    with pytest.raises(
        vf.ConfigError, match=r"task built: the RUN in line 3 of its Dockerfile failed.*no network"
    ):
        play(task, "true")


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("WORKDIR /app\n", "line 1: WORKDIR stands before FROM"),
        ("", "has no FROM"),
        (f"FROM {IMAGE}\nFROM {IMAGE}\n", "line 2: a second FROM"),
        (f"FROM --platform=linux/arm64 {IMAGE}\n", "FROM --platform=linux/arm64"),
        (f"FROM {IMAGE}\nUSER app\n", "line 2: USER is not supported"),
        (f"FROM {IMAGE}\nARG X\n", "ARG is not supported"),
        (f"FROM {IMAGE}\nADD https://x /y\n", "ADD is not supported"),
        (f"FROM {IMAGE}\nENTRYPOINT run\n", "ENTRYPOINT is not supported"),
        (f"FROM {IMAGE}\nCOPY --from=x a b\n", "COPY --from=x is not supported"),
        (f"FROM {IMAGE}\nRUN --mount=type=cache true\n", "RUN --mount=type=cache is not supported"),
        (f"FROM {IMAGE}\nRUN cat <<EOF\nhi\nEOF\n", "here-document"),
        (f"FROM {IMAGE}\nCOPY absent /app/\n", "COPY absent: there is no such file"),
        (f"FROM {IMAGE}\nCOPY ../tests /app/\n", "leaves the folder"),
        (f"FROM {IMAGE}\nCOPY start.txt\n", "names no destination"),
        (f"FROM {IMAGE}\nENV X\n", "ENV X has no value"),
    ],
)
def test_an_instruction_that_cannot_be_honoured_is_refused_with_its_line(
    tmp_path, dockerfile, said
):
    with pytest.raises(vf.ConfigError, match=said):
        vf.HarborEnv(write_task(tmp_path / "one", dockerfile=dockerfile), images=HOST)


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ('[environment]\nnetwork_mode = "public"\n', "environment.network_mode"),
        ("[environment]\nallow_internet = true\n", "environment.allow_internet"),
        ('[agent]\nnetwork_mode = "allowlist"\n', "agent.network_mode"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[environment]\ncpus = 4096\n", "environment.cpus"),
        ('[environment.tpu]\ntype = "v4"\n', "environment.tpu"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "environment.mcp_servers"),
        ('[environment.healthcheck]\ncommand = "true"\n', "environment.healthcheck"),
        ('[environment]\nos = "windows"\n', "environment.os"),
        ('[agent]\nuser = "app"\n', "agent.user"),
        ('[verifier.environment]\ndocker_image = "x"\n', "verifier.environment"),
        ('[[verifier.collect]]\nservice = "db"\ncommand = "true"\n', "verifier.collect"),
        ('[[steps]]\nname = "one"\n', "steps"),
        ('schema_version = "2.0"\n', "schema_version"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_or_waived(tmp_path, toml, key):
    task = write_task(tmp_path / "one", toml)
    with pytest.raises(
        vf.ConfigError, match=f"task one: {key} cannot be honoured: .*waive="
    ) as refused:
        vf.HarborEnv(task, images=HOST)
    assert refused.value.key == key
    assert vf.HarborEnv(task, images=HOST, waive=[key]).tasks()[0].name == "one"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "tests" / "test.sh").unlink(), "test.sh is missing"),
        (lambda folder: (folder / "instruction.md").unlink(), "instruction.md is missing"),
        (lambda folder: (folder / "task.toml").write_text("["), "task.toml cannot be read"),
        (
            lambda folder: (folder / "task.toml").write_text("[agent]\ntimeout_secs = 3\n"),
            "did you mean",
        ),
        (
            lambda folder: (folder / "task.toml").write_text("[agent]\ntimeout_sec = 'x'\n"),
            "must be a number above 0",
        ),
        (
            lambda folder: (folder / "task.toml").write_text("artifacts = ['app']"),
            "must be an absolute path",
        ),
        (
            lambda folder: (folder / "environment" / "docker-compose.yaml").write_text(""),
            "docker-compose.yaml",
        ),
        (
            lambda folder: (folder / "tests" / ".harborignore").write_text("data/"),
            "tests/.harborignore cannot be",
        ),
        (lambda folder: (folder / "tests" / "data").symlink_to("/etc"), "leaves the task folder"),
        (
            lambda folder: (folder / "environment" / "Dockerfile").unlink(),
            "files without a Dockerfile",
        ),
    ],
)
def test_a_task_folder_that_is_not_whole_is_refused(task, change, said):
    change(task)
    with pytest.raises(vf.ConfigError, match=said):
        vf.HarborEnv(task, images=HOST)


def test_parameters_that_cannot_be_used_are_named(task, tmp_path):
    with pytest.raises(vf.ConfigError, match="pass path"):
        vf.HarborEnv()
    with pytest.raises(vf.ConfigError, match="is no task folder and holds none"):
        vf.HarborEnv(tmp_path / "absent")
    with pytest.raises(vf.ConfigError, match="image 'debian:bookworm' is not here"):
        vf.HarborEnv(task)
    with pytest.raises(vf.ConfigError, match=r"there is no agent 'codec'.*did you mean .codex"):
        vf.HarborEnv(task, images=HOST, agent="codec")
    with pytest.raises(vf.ConfigError, match="and not both"):
        vf.HarborEnv(task, images=HOST, agent="oracle", command=["sh"])
    with pytest.raises(vf.ConfigError, match="are for an agent program"):
        vf.HarborEnv(task, images=HOST, agent_args=["--quiet"])
    with pytest.raises(vf.ConfigError, match="grading is 'none'"):
        vf.HarborEnv(task, images=HOST, grading="none")
    with pytest.raises(vf.ConfigError, match="takes no working_dir"):
        vf.HarborEnv(task, images=HOST, working_dir="/x")


# --- forging --------------------------------------------------------------------------------------

WRONG = "echo wrong > /app/out.txt"
REWARDED = (
    "cd /logs; mkdir -p verifier; echo '{\"reward\": 1}' > verifier/r; mv verifier/r"
    " verifier/reward.json"
)
FORGERIES = {
    "a reward file": f"{REWARDED}; echo 1 > /logs/verifier/reward.txt",
    "a daemon": f"(trap '' HUP; while true; do {REWARDED}; sleep 0.002; done) > /dev/null 2>&1 &",
    "edited tests": (
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555"
        " /tests /tests/test.sh"
    ),
    "programs in PATH": (
        "mkdir -p /usr/local/bin ~/bin; for p in cat bash python3; do printf '#!/bin/sh\\necho"
        " right\\n' > $p; chmod 755 $p; cp $p /usr/local/bin/$p; cp $p ~/bin/$p; done"
    ),
    "start files": (
        "for f in .bashrc .profile .bash_profile; do echo 'cat() { echo right; }' > ~/$f; cp ~/$f"
        " /app/$f; done"
    ),
    "links": "rm -rf /app; ln -s /logs/verifier /app",
    "a link to itself": "cd /; rm -rf /app; ln -s /app /app; chmod 0 ~",
    "a file for a folder": "cd /; rm -rf /app; echo right > /app",
    "a worker taken over": (
        "for p in /proc/[0-9]*; do [ $p != /proc/$$ ] && kill -STOP ${p#/proc/} 2>/dev/null; done;"
        " true"
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_result_earns_nothing_whatever_the_model_leaves_behind(task, name):
    results = play(task, WRONG, FORGERIES[name], timeout_per_command_seconds=2)
    assert reward(results) == 0.0


def test_a_right_result_earns_one_with_a_forger_beside_it(task):
    assert reward(play(task, "echo right > /app/out.txt", FORGERIES["a daemon"])) == 1.0


def test_negative_control_checks_beside_the_models_processes_are_forged(tmp_path):
    # the daemon has time to write after the test
    waits = write_task(tmp_path / "waits", test=f"{TEST}sleep 0.5\n")
    assert reward(play(waits, WRONG, FORGERIES["a daemon"], grading="shared")) == 1.0


def test_shared_grading_is_only_done_on_request(tmp_path):
    asks = write_task(tmp_path / "asks", '[verifier]\nenvironment_mode = "shared"\n')
    with pytest.raises(
        vf.ConfigError, match="the model can forge the verdict; pass grading='shared'"
    ):
        play(asks)
    assert reward(play(asks, "echo right > /app/out.txt", grading="shared")) == 1.0
    nothing = write_task(tmp_path / "nothing", dockerfile=f"FROM {IMAGE}\n")
    with pytest.raises(vf.ConfigError, match="declares no artifacts and its work folder is /"):
        play(nothing)


COMPARES = (
    "#!/bin/bash\ncd /tests\ncmp out.txt /app/out.txt; echo $((! $?)) > /logs/verifier/reward.txt\n"
)
LINKS = {
    "absolute": "ln -s /tests/out.txt out.txt",
    "relative": "ln -s ../tests/out.txt out.txt",
    "a folder": "ln -s /tests d; ln -s d/out.txt out.txt",
    "through /proc": "ln -s /proc/self/cwd/out.txt out.txt",
    "the root": "ln -s /proc/self/root r; ln -s r/tests/out.txt out.txt",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_to_the_answers_of_the_tests_is_none(tmp_path, name):
    task = write_task(tmp_path / "compares", test=COMPARES, tests__out_txt="right\n")
    assert reward(play(task, LINKS[name])) == 0.0


@pytest.mark.parametrize("name", LINKS)
def test_negative_control_in_the_agents_sandbox_it_is_the_answer(tmp_path, name):
    task = write_task(tmp_path / "compares", test=COMPARES, tests__out_txt="right\n")
    assert reward(play(task, LINKS[name], grading="shared")) == 1.0


def test_links_within_the_artifacts_and_to_programs_stay(tmp_path):
    test = (
        "#!/bin/bash\n[ $(cat /app/in) = right ] && [ $(/app/'my cat' /app/out.txt) = right ];"
        " echo $((! $?)) > /logs/verifier/reward.txt\n"
    )
    task = write_task(tmp_path / "links", test=test)
    assert (
        reward(
            play(
                task,
                "echo right > out.txt; ln -s out.txt in; ln -s /bin/cat 'my cat'; ln -s /tests x",
            )
        )
        == 1.0
    )


DOUBLE = (
    "#!/bin/bash\nexec python3 -I -c \"\nimport sys; sys.path.insert(0, '/app'); from solution"
    " import double\nopen('/logs/verifier/reward.txt', 'w').write(str(int(double(4) == 8)))\"\n"
)
"""Imports the model's code beside the check."""
EQUAL = (
    "printf 'class Any:\\n    def __eq__(self, other): return True\\ndef double(n): return"
    " Any()\\n' > solution.py"
)


def test_negative_control_tests_that_import_the_models_code_are_forged(tmp_path):
    """The limit that the documentation names: such tests share the sandbox with what they check."""
    assert reward(play(write_task(tmp_path / "imports", test=DOUBLE), EQUAL)) == 1.0


def test_tests_that_read_what_the_program_printed_are_not(tmp_path):
    toml = (
        'artifacts = ["/logs/artifacts"]\n[[verifier.collect]]\ncommand = "mkdir -p'
        ' /logs/artifacts; python3 -I /app/solution.py 4 > /logs/artifacts/out.txt"\ntimeout_sec'
        " = 5\n"
    )
    test = (
        '#!/bin/bash\n[ "$(cat /logs/artifacts/out.txt)" = 8 ]; echo $((! $?)) >'
        " /logs/verifier/reward.txt\n"
    )
    task = write_task(tmp_path / "prints", toml, test=test)
    assert reward(play(task, EQUAL)) == 0.0
    forger = (
        'echo \'import os; os.makedirs("/logs/verifier"); open("/logs/verifier/reward.txt",'
        ' "w").write("1")\''
    )
    assert reward(play(task, f"{forger} > solution.py")) == 0.0
    assert reward(play(task, "echo 'import sys; print(2 * int(sys.argv[1]))' > solution.py")) == 1.0


# --- agent programs -------------------------------------------------------------------------------

PROGRAM = WRITER.replace("answer.txt", "out.txt")
"""Writes what the model tells it into out.txt of its working directory."""
SAID = (
    "#!/bin/sh\nls -d /run/verifiers /opt/agent /sandbox/home/agent.py\n" + TEST.partition("\n")[2]
)
"""Also prints which of the agent's places the tests see."""


def run_program(folder, script=PROGRAM, text="right", **parameters):
    parameters = {
        "images": HOST,
        "sandbox": needs_sandbox(),
        "agent_files": {"~/agent.py": script},
    } | parameters
    env = vf.HarborEnv(folder, command=["python3", "{home}/agent.py", "{prompt}"], **parameters)
    client = ScriptedClient([vf.ToolCall("c1", "write", {"text": text}), "done"], tokens=True)
    return env.evaluate(client, "m", state_columns=["verdict", "trajectory"])


def test_an_agent_program_works_in_the_sandbox_of_the_task_and_is_graded_in_another(tmp_path):
    task = write_task(tmp_path / "one", test=SAID)
    results = run_program(task, PROGRAM + "print(open('start.txt').read(), os.getcwd())")
    (output,) = results.outputs
    assert (reward(results), output.stop_condition, output["agent"]["roles"]) == (
        1.0,
        "agent_ended",
        ["main"] * 2,
    )
    assert output["agent"]["log"] == "done\nstart\n /app\n"
    assert output["verdict"]["output"].count("No such file") == 3, (
        "the tests see nothing of the agent's but /app"
    )
    assert output["trajectory"][0]["prompt"][-1]["content"] == "Write right to /app/out.txt."
    assert output.metrics["num_turns"] == 2


@pytest.mark.parametrize(
    ("toml", "setting"),
    [
        ("[environment]\nmemory_mb = 256\n", "environment.memory_mb of its task.toml"),
        ("", "memory_gb"),
    ],
)
def test_an_agent_program_without_memory_names_the_key_of_its_task(tmp_path, toml, setting):
    task = write_task(tmp_path / "one", toml)
    script = PROGRAM + "b = b'x' * 2**30\ntime.sleep(20)"
    (output,) = run_program(task, script, memory_gb=0.25).outputs
    assert output.error["error"] == "SandboxLimit"
    assert output.error["message"].endswith(f"reached the limit of memory ({setting})")


def test_an_agent_program_forges_no_verdict(task, tmp_path):
    # the daemon has time to write after the test
    waits = write_task(tmp_path / "waits", test=f"{TEST}sleep 0.5\n")
    forger = (
        PROGRAM + "import subprocess\nsubprocess.Popen(['sh', '-c',"
        f" {FORGERIES['a daemon']!r}])\ntime.sleep(0.2)"
    )
    assert reward(run_program(task, forger, "wrong")) == 0.0
    assert reward(run_program(waits, forger, "wrong", grading="shared")) == 1.0, (
        "the negative control"
    )


def test_an_agent_program_is_ended_when_the_time_of_the_task_is_over_and_what_it_did_is_graded(
    tmp_path,
):
    # it writes its file before, on a busy machine
    slow = write_task(tmp_path / "slow", "[agent]\ntimeout_sec = 4.0\n")
    results = run_program(slow, PROGRAM + "time.sleep(600)")
    assert (reward(results), results["stop_conditions"]) == (1.0, ["agent_time_over"])
    quiet = write_task(tmp_path / "quiet", "[agent]\ntimeout_sec = 60.0\n")
    idle = run_program(quiet, PROGRAM + "time.sleep(600)", max_idle_seconds=3)
    assert "3 s (max_idle_seconds)" in idle["errors"][0]["message"]
    assert idle["rewards"] == [1.0]


def test_a_timer_that_ends_before_the_time_of_the_task_makes_no_error(tmp_path, monkeypatch):
    """As uvloop's do, by a millisecond."""
    next_call = AgentRun.next_call

    async def ends_early(run, idle_s):
        return await next_call(run, idle_s - 0.1)

    monkeypatch.setattr(AgentRun, "next_call", ends_early)
    slow = write_task(tmp_path / "slow", "[agent]\ntimeout_sec = 4.0\n")
    results = run_program(slow, PROGRAM + "time.sleep(600)")
    assert (reward(results), results["stop_conditions"]) == (1.0, ["agent_time_over"])


def test_a_program_of_the_working_directory_stays_out_of_the_work_folder(
    task, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM + "print(os.listdir('.'), os.path.dirname(__file__))")
    env = vf.HarborEnv(
        task, images=HOST, sandbox=needs_sandbox(), command=["python3", "mine.py", "{prompt}"]
    )
    (output,) = env.evaluate(ScriptedClient("done"), "m").outputs
    assert output["agent"]["log"] == "done\n['start.txt'] /sandbox/home\n"
    assert output.reward == 0.0
    assert "'~/mine.py': " in str(env.identity()["agent_files"]), (
        "another program is another environment"
    )


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "toml", "said"),
    [
        ("#!/bin/sh\necho broken\n", "", "wrote neither reward.json nor reward.txt: broken"),
        ("#!/bin/sh\necho x > /logs/verifier/reward.txt\n", "", "reward.txt that cannot be read"),
        ("#!/bin/sh\necho nan > /logs/verifier/reward.txt\n", "", "is not finite"),
        ('#!/bin/sh\necho \'{"reward": "1"}\' > /logs/verifier/reward.json\n', "", "not a number"),
        (
            '#!/bin/sh\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n',
            "",
            "none is named 'reward'",
        ),
        ("#!/bin/sh\nsleep 30\n", "[verifier]\ntimeout_sec = 0.5\n", "did not end within 0.5 s"),
        ("#!/bin/sh\necho 1 > /logs/verifier/reward.txt; kill -9 $$\n", "", "were killed"),
    ],
)
def test_without_a_verdict_the_reward_is_unknown_and_the_reason_said(tmp_path, test, toml, said):
    results = play(write_task(tmp_path / "one", toml, test=test))
    assert str(results["rewards"]) == "[nan]"
    assert said in results["errors"][0]["message"]


def test_all_rewards_and_the_output_of_the_tests_are_kept(tmp_path):
    test = (
        '#!/bin/sh\necho said; echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json\n'
    )
    results = play(write_task(tmp_path / "one", test=test))
    assert reward(results) == 0.25
    assert results.outputs[0]["verdict"] == {
        "rewards": {"reward": 0.25, "style": 1.0},
        "output": "said\n",
    }


def test_too_large_an_artifact_is_none(task):
    assert reward(play(task, "echo right > out.txt; head -c 70M /dev/zero > big")) == 0.0

"""What people's code does all day runs in a cage: the filter of system calls is a list of what that needs."""

from __future__ import annotations

import shutil

import pytest

from llmrl.sandbox.service import PythonExecutorService

pytestmark = pytest.mark.usefixtures("own_programs")

PIECES = {
    "arrays": "import numpy as np\na = np.random.default_rng(0).random((300, 300))\n"
    "print(np.allclose(np.linalg.inv(a) @ a, np.eye(300)))\nnp.save('a.npy', a)\n"
    "b = np.load('a.npy', mmap_mode='r+'); b[0, 0] = 1; b.flush(); print(b.shape)",
    "mathematics": "import sympy\nx = sympy.Symbol('x'); print(sympy.integrate(sympy.sin(x) ** 2, (x, 0, sympy.pi)))\n"
    "from math_verify import parse, verify\nprint(verify(parse('$\\\\frac{1}{2}$', parsing_timeout=99), "
    "parse('0.5', parsing_timeout=99), timeout_seconds=99))",
    "threads": "import threading, queue, concurrent.futures as f\nq = queue.Queue()\n"
    "threads = [threading.Thread(target=q.put, args=(n,)) for n in range(8)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\nprint(q.qsize())\n"
    "with f.ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-9, 0))))",
    "processes": "import os\nimport multiprocessing as mp\nfork = mp.get_context('fork')\nours, theirs = fork.Pipe()\n"
    "child = fork.Process(target=theirs.send, args=([1, 2],)); child.start()\nprint(ours.recv()); child.join()\n"
    "print(child.exitcode, os.cpu_count() > 0, os.sysconf('SC_PHYS_PAGES') > 0)",
    "a database": "import sqlite3\nfor mode in ('delete', 'wal'):\n"
    "    c = sqlite3.connect('db'); c.execute(f'pragma journal_mode={mode}')\n"
    "    c.execute('create table if not exists t (x)'); c.execute('insert into t values (7)'); c.commit()\n"
    "    print(c.execute('select sum(x) from t').fetchone()); c.close()",
    "an event loop": "import asyncio, sys\n"
    "async def f():\n    p = await asyncio.create_subprocess_exec('echo', 'said', stdout=-1)\n"
    "    return (await p.communicate())[0], await asyncio.to_thread(pow, 2, 5), p.returncode\nprint(asyncio.run(f()))",
    "imports": "import ssl, hashlib, secrets, ctypes, uuid, zoneinfo, lzma, bz2, curses, readline, http.client, email\n"
    "print(hashlib.sha256(b'x').hexdigest()[:4], len(secrets.token_bytes(9)), ssl.create_default_context() is None)",
    "files": "import mmap, os, pathlib, shutil, tempfile, zipfile, tarfile, glob\n"
    "with tempfile.TemporaryDirectory() as d:\n    p = pathlib.Path(d, 'a'); p.write_text('x' * 5000)\n"
    "    p.rename(f'{d}/b')\n"
    "    shutil.copyfile(f'{d}/b', f'{d}/c'); os.link(f'{d}/c', f'{d}/d'); os.symlink('c', f'{d}/e')\n"
    "    with open(f'{d}/b', 'r+b') as f:\n        m = mmap.mmap(f.fileno(), 0); m[:2] = b'ab'\n"
    "        m.flush(); m.close()\n"
    "        f.truncate(10); os.posix_fallocate(f.fileno(), 0, 100); os.fsync(f.fileno())\n"
    "    with zipfile.ZipFile(f'{d}/z.zip', 'w') as z: z.write(f'{d}/b', 'b')\n"
    "    print(len(glob.glob(d + '/*')), pathlib.Path(d, 'e').stat().st_nlink, os.path.getsize(f'{d}/b'))\n"
    "t = tempfile.TemporaryFile(); t.write(b'1'); t.seek(0); print(t.read(), tempfile.mkstemp()[0] > 2)\n"
    "os.mkfifo('pipe'); print(pathlib.Path('pipe').is_fifo())",
    "signals": "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05); signal.raise_signal(signal.SIGALRM)\n"
    "import faulthandler, resource; faulthandler.enable(open('trace', 'w'))\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (20, 25)); print(resource.getrlimit(resource.RLIMIT_CORE)[0] <= 1)",
}
SHELL = {
    "text": "printf 'b 2\\na 1\\n' | sort | tee t | sed s/a/c/ | grep c | awk '{print $2}' | xargs -n1 echo; wc -l < t;"
    " head -1 t; tail -1 t; cut -c1 t; tr a-z A-Z < t; uniq t; find . -name t; diff t t && cmp t t; stat -c %s t",
    "folders": "mkdir -p a/b; cp -r a c; echo 1 > t; cp t c/t; mv c d; ls -l d | wc -l;"
    " ln -s t l; readlink l; rm -r d; ls",
    "time": "timeout 60 true && echo done; timeout 0.1 sleep 60; echo $?; date +%Y | wc -c;"
    " nproc >/dev/null && id -u | wc -l",
    "bash": "bash -c 'a=(1 2); for i in ${a[@]}; do (echo $i) & wait; done; cat <<< x; echo $((6*7))'",
    "archives": "echo x > f; tar --no-same-permissions -mczf f.tgz f && tar -tzf f.tgz; gzip f; zcat f.gz;"
    " truncate -s 7 g; wc -c < g; dd if=g of=h bs=7 2>/dev/null; sha256sum h | cut -c1-4; split -b3 g; ls x*",
    "perl": 'perl -e \'print 6*7, "\\n"; system("true") == 0 or die; open(F, ">p"); print F 1; close F; print -s "p"\'',
    "make": "printf 'all:\\n\\t@echo made\\n' > Makefile; make -s -j2",
}
GIT = (
    "git init -q . && git config user.email a@b && git config user.name a && echo 1 > f && git add f &&"
    " git commit -qm one && git checkout -q -b two && echo 2 > f && git commit -qam two && git log --oneline | wc -l &&"
    " git diff HEAD~1 --stat | tail -1 && git gc -q && git clone -q . copy && git -C copy status -s && echo cloned"
)
COMPILE = (
    "printf '#include <stdio.h>\\n#include <pthread.h>\\nstatic void *f(void *x) { return x; }\\nint main(void) "
    '{ pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("compiled"); return 0; }\\n\' > m.c &&'
    " gcc -O1 -pthread m.c -o m && ./m"
)


PRINTED = {
    "arrays": "True\n(300, 300)\n", "mathematics": "pi/2\nTrue\n", "threads": "8\n45\n",
    "processes": "[1, 2]\n0 True True\n", "a database": "(7,)\n(14,)\n", "an event loop": "(b'said\\n', 32, 0)\n",
    "imports": "2d71 9 False\n", "files": "5 2 100\nb'1' True\nTrue\n", "signals": "rang\nrang\nTrue\n",
    "text": "1\n2\na 1\nb 2\na\nb\nA 1\nB 2\na 1\nb 2\n./t\n8\n", "folders": "3\nt\na\nl\nt\n",
    "time": "done\n124\n5\n1\n", "bash": "1\n2\nx\n42\n", "archives": "f\nx\n7\n8378\nxaa\nxab\nxac\n",
    "perl": "42\n1", "make": "made\n", "git": "2\n 1 file changed, 1 insertion(+), 1 deletion(-)\ncloned\n",
    "gcc": "compiled\n",
}  # fmt: skip
LIBRARIES = ("arrays", "mathematics")


def in_shell(name):
    command = {**SHELL, "git": GIT, "gcc": COMPILE}[name]
    return (
        "import os, subprocess, sys, tempfile\nos.chdir(tempfile.mkdtemp())\n"
        f"r = subprocess.run(['sh', '-c', {command!r}], capture_output=True, text=True)\n"
        "print(r.stdout, end=''); print(r.stderr.strip(), file=sys.stderr, end='')"
    )


def test_python_and_programs_of_the_system_do_their_work(cage):
    for name in [name for name in PIECES if name not in LIBRARIES]:
        result = cage.run(PIECES[name], session=name)
        cage.service.release(name)
        assert (result["stdout"], result["stderr"]) == (PRINTED[name], ""), name
    names = {*SHELL, *(name for name in ("git", "gcc") if shutil.which(name))}
    if (cage.user, cage.level) == ("ordinary", "process"):
        names -= {"git", "gcc", "archives"}  # which change modes and times of their files: that is refused there
    for name in names:
        result = cage.run(in_shell(name))
        assert (result["stdout"], result["stderr"]) == (PRINTED[name], ""), name


def test_libraries_of_this_python_do_their_work():
    pytest.importorskip("math_verify")
    service = PythonExecutorService(timeout=100, num_ready=1)
    for name in LIBRARIES:
        result = service.execute(PIECES[name])
        assert (result["stdout"], result["stderr"]) == (PRINTED[name], ""), name
    service.close()

import ast,re,subprocess
from pathlib import Path
W=Path('/tmp/w40/lg/wt')
own=[W/l for l in subprocess.run('. /tmp/w40/lg/env.sh; own',shell=True,capture_output=True,text=True,executable='/bin/bash').stdout.split()]
allsrc={p:p.read_text() for p in (W/'src').rglob('*.py') if '_pb2' not in p.name}
tests={p:p.read_text() for b in('tests','bench','tools') for p in (W/b).rglob('*.py')}
from collections import Counter
def words(d):
    c=Counter()
    for t in d.values(): c.update(re.findall(r'\w+',t))
    return c
cs=words(allsrc); ct=words(tests)
for p in own:
    t=ast.parse(p.read_text())
    for n in ast.walk(t):
        names=[]
        if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): names=[n.name]
        elif isinstance(n,ast.Assign): names=[x.id for x in n.targets if isinstance(x,ast.Name)]
        elif isinstance(n,ast.AnnAssign) and isinstance(n.target,ast.Name): names=[n.target.id]
        elif isinstance(n,ast.Attribute) and isinstance(n.ctx,ast.Store): names=[n.attr]
        for x in names:
            if x.startswith('__'): continue
            if cs[x]<=1: print('ONCE',p.relative_to(W/'src/headrace/gateway'),x,'tests',ct[x])
# params always default

// node compiled_stdlib.mjs PYODIDE TARGET
//
// Pyodide's standard library is a zip file of sources, and a browser would compile those that Python imports as it
// starts at every visit: two thirds of the time that takes. This writes the same zip file to TARGET with these modules
// compiled, by the Python in the folder PYODIDE. As with `python -OO` they have no docstrings and no assertions, so
// that the file grows by less than half a megabyte.

import { writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, target] = process.argv.slice(2).map((path) => resolve(path));
const { loadPyodide } = await import(pathToFileURL(resolve(folder, "pyodide.mjs")).href);
const python = await loadPyodide({ indexURL: `${folder}/` });
const compiled = python.runPython(`
import io, sys, zipfile
from importlib._bootstrap_external import _code_to_hash_pyc

place = next(path for path in sys.path if path.endswith(".zip"))
loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
out = io.BytesIO()
with zipfile.ZipFile(place) as sources, zipfile.ZipFile(out, "w") as archive:
    for name in sources.namelist():
        data, file = sources.read(name), f"{place}/{name}"
        if file in loaded:
            code = compile(data, file, "exec", dont_inherit=True, optimize=2)
            name, data = f"{name}c", bytes(_code_to_hash_pyc(code, bytes(8), checked=False))
        archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)
out.getvalue()
`);
writeFileSync(target, compiled.toJs());

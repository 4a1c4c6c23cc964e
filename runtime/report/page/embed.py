"""Joins the template of the report and writes it as C++ (runtime/report/page_template.h); the build runs it.

    embed.py page.html page.css SCRIPT... > page_template.cc

The content security policy names the hashes of the style and of the script, so nothing else in the page is ever applied or run."""

import base64
import hashlib
import sys

CHUNK = 8000  # characters of a literal; a compiler need not take long ones


def hash_of(text):
    return "'sha256-%s'" % base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page(html, style, scripts):
    script = "\n".join(scripts)
    for name, text in (("style", style), ("script", script)):
        if "</" + name in text.lower() or "<!--" in text:
            raise SystemExit("embed.py: the %s would end its own element" % name)
    policy = "default-src 'none'; script-src %s; style-src %s; base-uri 'none'; form-action 'none'" % (hash_of(script), hash_of(style))
    for mark, text in (("@POLICY@", policy), ("@STYLE@", style), ("@SCRIPT@", script)):
        if html.count(mark) != 1:
            raise SystemExit("embed.py: the page should have %s once" % mark)
        html = html.replace(mark, text)
    if html.count("@DATA@") != 1:
        raise SystemExit("embed.py: the page should have @DATA@ once")
    return html


def main(paths):
    html, style, *scripts = [open(path, encoding="utf-8").read() for path in paths]
    text = page(html, style, scripts)
    chunks = [text[i:i + CHUNK] for i in range(0, len(text), CHUNK)]
    print('#include "runtime/report/page_template.h"\n\nnamespace annulus {\n\nstd::string_view page_template() {\n  static constexpr char kPage[] =')
    print("\n".join('R"page(%s)page"' % chunk for chunk in chunks) + ";")
    print("  return {kPage, sizeof kPage - 1};\n}\n\n}  // namespace annulus")


if __name__ == "__main__":
    main(sys.argv[1:])

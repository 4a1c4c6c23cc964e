#!/usr/bin/env python3
"""Comments of headers as the site shows them: site_comments_test.py docs/site/doxygen_filter.py."""

import importlib.util
import sys
import unittest

SPEC = importlib.util.spec_from_file_location("doxygen_filter", sys.argv.pop(1))
doxygen_filter = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(doxygen_filter)


def filtered(text):
    return doxygen_filter.filtered(text, "comm/x.h").split("\n")


class Comments(unittest.TestCase):
    def test_the_first_comment_describes_the_file(self):
        self.assertEqual(filtered("// What x is.\n#pragma once\n")[:4], ["/** @file comm/x.h", "", "What x is.", " */"])

    def test_a_comment_before_a_declaration_is_its_documentation(self):
        self.assertEqual(filtered("#pragma once\n// Adds `a` & b.\nint add(int a);\n")[1:5],
                         ["/**", "Adds <tt>a</tt> \\& b.", " */", "int add(int a);"])

    def test_a_comment_behind_a_declaration_goes_on_below_it(self):
        self.assertEqual(filtered("#pragma once\n  int n = 0;  // one\n              // two\n")[1:3],
                         ["  int n = 0;  ///< one", "              ///< two"])

    def test_code_and_lists_are_kept(self):
        lines = filtered("#pragma once\n// As here:\n//   f(1, 2);\n// - one\n//   and more\nint f(int a, int b);\n")
        self.assertEqual(lines[2:8], ["As here:", "@verbatim", "  f(1, 2);", "@endverbatim", "- one", "  and more"])

    def test_what_describes_no_declaration_stays(self):
        self.assertIn("// Of nothing.", filtered("#pragma once\n// Of nothing.\n\nint n;\n"))
        self.assertIn('const char* s = "a//b";', filtered('#pragma once\nconst char* s = "a//b";\n'))

    def test_a_heading_names_a_group(self):
        lines = filtered("#pragma once\nclass A {\n  // ---- Sums. They block.\n\n  void f();\n};\n")
        self.assertIn("  /** @name Sums", lines)
        self.assertLess(lines.index("  ///@{"), lines.index("  ///@}"))


if __name__ == "__main__":
    unittest.main()

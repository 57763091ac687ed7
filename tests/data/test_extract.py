from unspoken.data.extract import html_text, pod_text, rst_text


def test_html_keeps_prose_and_drops_code_tables_and_navigation():
    page = """<html><head><title>T</title><style>p {}</style></head><body><nav>Up</nav>
      <h1>The <em>first</em>&nbsp;head</h1><p>One &amp; two<br>three <code>x</code>.
      <table><tr><td>cell<table><tr><td>inner</table></table>After the table.<pre>code()</pre>
      <ul><li>first point<li>second <a href="u">point</a></ul><script>if (a < b) {}</script></body></html>"""
    assert html_text(page.encode()).split("\n\n") == [
        "The first head",
        "One & two three x.",
        "After the table.",
        "first point",
        "second point",
    ]


def test_html_in_latin1_is_read():
    assert html_text("<p>naïve</p>".encode("latin-1")) == "naïve"


RST = """\
.. _target:
.. This comment
   goes on.

Title
=====

A *first* paragraph with :func:`~os.path.join`, ``code``, :ref:`a label <label>`,
`a link <http://x>`_ and **bold** text [1]_.  Then code::

    dropped()

    dropped_too()

- item one
  continued
- item two

.. note:: dropped argument

   The body of a note
   is prose.

.. code-block:: python
   :linenos:

   dropped()

.. function:: join(a, b)
   :noindex:

   Joins *a* and *b*.

   >>> dropped

+-----+-----+
| dropped   |
+-----+-----+

The end with \\*stars\\*.
"""


def test_rst_keeps_prose_and_drops_code_comments_and_tables():
    assert rst_text(RST.encode()).split("\n\n") == [
        "Title",
        "A first paragraph with os.path.join, code, a label, a link and bold text. Then code:",
        "item one continued",
        "item two",
        "The body of a note is prose.",
        "Joins a and b.",
        "The end with *stars*.",
    ]


POD = """\
use strict;

=head1 NAME

The B<first I<nested>> paragraph, with C<< $a->{b} >> and E<lt>tagE<gt>,
see L<the page|perlop/Names> or L</Local part>.X<index>

  verbatim();

=over

=item one

Text of the item.

=begin html

<p>dropped</p>

=end html

=for comment dropped too

Last words.

=cut

not pod
"""


def test_pod_keeps_prose_and_drops_code_and_commands():
    assert pod_text(POD.encode()).split("\n\n") == [
        "The first nested paragraph, with $a->{b} and <tag>, see the page or Local part.",
        "Text of the item.",
        "Last words.",
    ]

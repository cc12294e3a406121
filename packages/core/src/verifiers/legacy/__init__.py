"""Small functions that packages written for older versions import from their utilities.

They are reached by their older modules (``verifiers.utils.…``, the tables in ``compat``) and by two methods that older
trainers call; each is a few lines over what this version has, and nothing else of this version calls them. A new
package wants none of them.
"""

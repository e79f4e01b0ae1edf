"""What proposes the tree of drafts: a recurrent drafter, a smaller LM, or the text itself."""

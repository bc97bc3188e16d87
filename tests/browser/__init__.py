"""Tests that look at a page in a real browser. A package, so that its fixtures end with it: while Playwright runs,
asyncio believes that the whole process is inside its loop, which the other tests should not have to know."""

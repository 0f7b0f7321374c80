import unittest

from retry import call, delays


class RetryTest(unittest.TestCase):
    def test_three_attempts_have_two_delays(self):
        self.assertEqual(delays(3), [1.0, 2.0])

    def test_a_call_that_succeeds_is_not_repeated(self):
        self.assertEqual(call(lambda: 7, 3, lambda seconds: None), 7)

import unittest

from retry import call, delays


class HiddenTest(unittest.TestCase):
    def test_the_last_error_is_raised_after_the_last_attempt(self):
        calls, slept = [], []

        def fail():
            calls.append(1)
            raise KeyError(len(calls))

        with self.assertRaises(KeyError) as caught:
            call(fail, 3, slept.append)
        self.assertEqual((len(calls), slept, caught.exception.args), (3, [1.0, 2.0], (3,)))

    def test_delays_end_at_the_limit(self):
        self.assertEqual(delays(5, first=8.0, limit=20.0), [8.0, 16.0, 20.0, 20.0])

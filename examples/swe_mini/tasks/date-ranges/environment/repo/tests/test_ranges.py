import unittest
from datetime import date

from ranges import merge, overlap


class RangesTest(unittest.TestCase):
    def test_ranges_that_share_one_day_overlap(self):
        self.assertTrue(
            overlap((date(2024, 1, 1), date(2024, 1, 5)), (date(2024, 1, 5), date(2024, 1, 9)))
        )

    def test_ranges_that_touch_become_one(self):
        ranges = [(date(2024, 1, 3), date(2024, 1, 4)), (date(2024, 1, 1), date(2024, 1, 2))]
        self.assertEqual(merge(ranges), [(date(2024, 1, 1), date(2024, 1, 4))])

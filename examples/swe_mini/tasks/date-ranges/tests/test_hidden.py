import unittest
from datetime import date

from ranges import merge, overlap


class HiddenTest(unittest.TestCase):
    def test_a_single_day_overlaps_itself(self):
        day = (date(2024, 1, 1), date(2024, 1, 1))
        self.assertTrue(overlap(day, day))
        self.assertFalse(overlap(day, (date(2024, 1, 2), date(2024, 1, 3))))

    def test_a_range_inside_another_does_not_shorten_it(self):
        outer, inner = (date(2024, 1, 1), date(2024, 1, 9)), (date(2024, 1, 2), date(2024, 1, 3))
        self.assertEqual(merge([inner, outer]), [outer])

"""Pictures are fitted to the model's square as each author's code fits them."""

import numpy as np
import pytest

from models.inputs.pictures import Antialiased, picture_fit


def test_torchs_bilinear_resizing_reads_the_pixels_next_to_each_place():
    row = np.array([0, 10, 20, 90, 100, 200], np.uint8)
    picture = np.repeat(np.tile(row, (6, 1))[..., None], 3, -1)
    found = picture_fit("bilinear", 4)(picture)
    # Middles of four places among six: 0.25, 1.75, 3.25 and 4.75.
    np.testing.assert_allclose(found[0, :, 0], [2.5, 17.5, 92.5, 175.0])
    assert found.dtype == np.float32


@pytest.mark.parametrize(("way", "border"), [("bilinear", 0.0), ("bilinear-dark", -255.0)])
def test_borders_of_lerobots_pictures_are_those_of_its_release(way, border):
    found = picture_fit(way, 8)(np.full((4, 8, 3), 200, np.uint8))
    assert (found[:2] == border).all()
    assert (found[2:6] == 200).all()
    assert (found[6:] == border).all()


def test_a_side_that_does_not_divide_is_cut_as_openpi_cuts_it():
    found = Antialiased(3)(np.full((5, 8, 3), 200, np.uint8))
    assert (found.max((1, 2)) > 0).tolist() == [False, True, False]  # 5 / (8 / 3) is 1.875
    whole = np.full((3, 3, 3), 7, np.uint8)
    assert Antialiased(3)(whole) is whole

"""Human wordings of Meta-World's 50 tasks; the benchmark itself has no language."""

PROMPTS = {
    "assembly-v3": (
        "put the ring onto the peg",
        "pick up the wrench and slip its ring over the peg",
    ),
    "basketball-v3": (
        "dunk the basketball",
        "put the ball through the hoop",
    ),
    "bin-picking-v3": (
        "move the cube from the red bin into the blue bin",
        "take the green block out of its bin and put it into the other one",
    ),
    "box-close-v3": (
        "put the lid on the box",
        "pick up the lid and close the box with it",
    ),
    "button-press-topdown-v3": (
        "press the button from above",
        "push the red button down",
    ),
    "button-press-topdown-wall-v3": (
        "press the button on top, behind the wall",
        "reach over the brick wall and push the button down",
    ),
    "button-press-v3": (
        "press the button",
        "push the red button on the front of the box",
    ),
    "button-press-wall-v3": (
        "press the button behind the wall",
        "go around the brick wall and push the button in",
    ),
    "coffee-button-v3": (
        "start the coffee machine",
        "press the coffee machine's button",
        "make coffee",
    ),
    "coffee-pull-v3": (
        "take the mug away from the coffee machine",
        "pull the mug to the marked spot",
    ),
    "coffee-push-v3": (
        "put the mug under the coffee machine",
        "push the mug to the coffee machine",
    ),
    "dial-turn-v3": (
        "turn the dial",
        "rotate the knob by half a turn",
    ),
    "disassemble-v3": (
        "take the ring off the peg",
        "lift the wrench off its peg",
    ),
    "door-close-v3": (
        "close the door",
        "push the door shut",
    ),
    "door-lock-v3": (
        "lock the door",
        "turn the latch to lock the door",
    ),
    "door-open-v3": (
        "open the door",
        "pull the door open by its handle",
    ),
    "door-unlock-v3": (
        "unlock the door",
        "turn the latch to unlock the door",
    ),
    "hand-insert-v3": (
        "put the block into the hole",
        "take the brown block down into the hole in the table",
    ),
    "drawer-close-v3": (
        "close the drawer",
        "push the drawer shut",
    ),
    "drawer-open-v3": (
        "open the drawer",
        "pull the drawer open by its handle",
    ),
    "faucet-open-v3": (
        "open the faucet",
        "turn the tap on",
    ),
    "faucet-close-v3": (
        "close the faucet",
        "turn the tap off",
    ),
    "hammer-v3": (
        "hammer the nail in",
        "pick up the hammer and drive the nail into the block",
    ),
    "handle-press-side-v3": (
        "press the handle down from the side",
        "push the sideways lever down",
    ),
    "handle-press-v3": (
        "press the handle down",
        "push the red handle all the way down",
    ),
    "handle-pull-side-v3": (
        "pull the handle up from the side",
        "lift the sideways lever",
    ),
    "handle-pull-v3": (
        "pull the handle up",
        "lift the red handle",
    ),
    "lever-pull-v3": (
        "pull the lever up",
        "turn the lever upwards",
    ),
    "pick-place-wall-v3": (
        "carry the puck over the wall to the marked spot",
        "pick up the puck and place it behind the wall, at the ball",
    ),
    "pick-out-of-hole-v3": (
        "take the puck out of the hole",
        "lift the red puck out of the hole and bring it to the ball",
    ),
    "pick-place-v3": (
        "pick up the puck and bring it to the marked spot",
        "place the red puck at the blue ball",
        "lift the puck to the ball",
    ),
    "plate-slide-v3": (
        "slide the plate into the goal",
        "push the black plate forward into the net",
    ),
    "plate-slide-side-v3": (
        "slide the plate sideways into the goal",
        "push the black plate to the side, into the net",
    ),
    "plate-slide-back-v3": (
        "pull the plate out of the goal",
        "slide the black plate back, out of the net",
    ),
    "plate-slide-back-side-v3": (
        "pull the plate sideways out of the goal",
        "slide the black plate to the side, out of the net",
    ),
    "peg-insert-side-v3": (
        "insert the peg into the hole in the side",
        "pick up the green peg and put it into the box's hole",
    ),
    "peg-unplug-side-v3": (
        "unplug the peg",
        "pull the peg out of the wall socket",
    ),
    "soccer-v3": (
        "score a goal",
        "push the ball into the net",
    ),
    "stick-push-v3": (
        "push the thermos with the stick",
        "grasp the blue stick and shove the bottle to the marked spot with it",
    ),
    "stick-pull-v3": (
        "pull the thermos with the stick",
        "grasp the blue stick, hook the bottle's handle and drag it to the marked spot",
    ),
    "push-v3": (
        "push the puck to the marked spot",
        "slide the red puck to the green ball",
    ),
    "push-wall-v3": (
        "push the puck around the wall",
        "slide the puck past the brick wall to the marked spot",
    ),
    "push-back-v3": (
        "push the block back to the marked spot",
        "drag the brown block towards the robot, to the ball",
    ),
    "reach-v3": (
        "reach the red ball",
        "move the hand to the marked spot",
    ),
    "reach-wall-v3": (
        "reach the ball at the wall",
        "move the hand around the wall to the marked spot",
    ),
    "shelf-place-v3": (
        "put the cube on the shelf",
        "pick up the blue block and place it on the shelf",
    ),
    "sweep-into-v3": (
        "sweep the block into the hole",
        "push the brown block into the hole in the table",
    ),
    "sweep-v3": (
        "sweep the block off the table",
        "push the brown block over the table's edge",
    ),
    "window-open-v3": (
        "open the window",
        "slide the window open",
    ),
    "window-close-v3": (
        "close the window",
        "slide the window shut",
    ),
}
"""Two or three wordings of each task."""

PARAPHRASES = {
    "assembly-v3": ("thread the ring over the peg",),
    "basketball-v3": ("make a basket",),
    "bin-picking-v3": ("move the block over to the other bin",),
    "box-close-v3": ("cover the box with its lid",),
    "button-press-topdown-v3": ("push the button downwards",),
    "button-press-topdown-wall-v3": ("from above, press the button that the wall hides",),
    "button-press-v3": ("push in the button",),
    "button-press-wall-v3": ("get past the wall and press the button",),
    "coffee-button-v3": ("brew a coffee",),
    "coffee-pull-v3": ("drag the cup back from the coffee machine",),
    "coffee-push-v3": ("slide the cup below the coffee machine",),
    "dial-turn-v3": ("twist the dial",),
    "disassemble-v3": ("remove the ring from the peg",),
    "door-close-v3": ("shut the door",),
    "door-lock-v3": ("make sure that the door is locked",),
    "door-open-v3": ("get the door open",),
    "door-unlock-v3": ("release the lock of the door",),
    "hand-insert-v3": ("lower the block into the opening",),
    "drawer-close-v3": ("shut the drawer",),
    "drawer-open-v3": ("pull out the drawer",),
    "faucet-open-v3": ("let the water run",),
    "faucet-close-v3": ("stop the water",),
    "hammer-v3": ("hit the nail with the hammer",),
    "handle-press-side-v3": ("move the handle at the side downwards",),
    "handle-press-v3": ("get the handle to its lowest place",),
    "handle-pull-side-v3": ("raise the handle at the side",),
    "handle-pull-v3": ("raise the handle",),
    "lever-pull-v3": ("raise the lever",),
    "pick-place-wall-v3": ("lift the puck across the wall and set it down at the target",),
    "pick-out-of-hole-v3": ("get the puck from the hole",),
    "pick-place-v3": ("carry the puck to the target",),
    "plate-slide-v3": ("move the plate into the net",),
    "plate-slide-side-v3": ("move the plate into the goal from the side",),
    "plate-slide-back-v3": ("drag the plate back from the goal",),
    "plate-slide-back-side-v3": ("drag the plate out of the goal to the side",),
    "peg-insert-side-v3": ("stick the peg into the box",),
    "peg-unplug-side-v3": ("draw the peg from its socket",),
    "soccer-v3": ("shoot the ball into the goal",),
    "stick-push-v3": ("use the stick to push the bottle away",),
    "stick-pull-v3": ("use the stick to bring the bottle nearer",),
    "push-v3": ("move the puck along the table to the target",),
    "push-wall-v3": ("bring the puck past the wall by pushing it",),
    "push-back-v3": ("pull the block nearer, as far as the target",),
    "reach-v3": ("bring the gripper to the target",),
    "reach-wall-v3": ("bring the gripper past the wall to the target",),
    "shelf-place-v3": ("set the cube down on the shelf",),
    "sweep-into-v3": ("brush the block into the hole",),
    "sweep-v3": ("brush the block off the edge",),
    "window-open-v3": ("push the window open",),
    "window-close-v3": ("shut the window",),
}
"""A wording of each task that no recording has, for judging policies."""
